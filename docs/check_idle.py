"""Refuse to measure speeds for pages and pictures while other programs use the cores.

    python docs/check_idle.py PROGRAM

The exit code is 2 on a busy machine. The printed line begins with the name of the program.
"""

import sys

from mpidl.ranks import thread_budget

SECONDS = 2.0


def main(program, statistics=thread_budget.STATISTICS):
    """Measure the load, print a line if the cores are busy, and return the exit code."""
    busy, limit = thread_budget.busy_share(SECONDS, statistics), thread_budget.BUSY_SHARE
    if busy <= limit:
        return 0
    print(
        f"{program}: expected idle cores, because pages and pictures show speeds: at most "
        f"{limit:.0%} busy, found {busy:.0%}; end the other programs first",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
