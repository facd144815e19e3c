"""The ranks that `python -m mpidl.verify --golden --ranks N` starts: the golden trainings."""

import json
import sys

from mpidl.files import on_rank_0, write_whole
from mpidl.ranks import failure
from mpidl.ranks.world import World
from mpidl.training import golden


def main() -> int:
    """Write the outcomes to the JSON file that the command line names; return the exit code."""
    (path,) = sys.argv[1:]
    world = World()
    outcomes = golden.check(world=world)
    on_rank_0(world, lambda: write_whole(path, json.dumps(outcomes).encode()))
    return 0


if __name__ == "__main__":
    failure.run(main)
