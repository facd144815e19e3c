"""Long trials of mpidl with random faults.

    python -m tests.soak kills --seed 1 --kills 1000 --log kills.jsonl
    python -m tests.soak kills --replay kills.jsonl --chain 17

`kills` starts a training again and again, and kills, stops or interrupts its processes at random
moments, until the run ends. See kills.py.

The seed determines everything that is drawn. The log has a line of JSON per start, with what was
drawn and what happened; --replay takes the drawn values from it. Exit code 0: no problem was
found; 1: there were problems, which the log and the last lines name.
"""

import argparse
import sys
from pathlib import Path

from . import kills


def parser():
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", usage=__doc__, allow_abbrev=False, add_help=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    chains = commands.add_parser("kills", allow_abbrev=False)
    chains.add_argument("--seed", type=int, default=1)
    chains.add_argument("--kills", type=int, default=20)
    chains.add_argument("--log", type=Path, default=Path("kills.jsonl"))
    chains.add_argument("--replay", type=Path)
    chains.add_argument("--chain", type=int)
    chains.set_defaults(run=kills.main)
    return parser


if __name__ == "__main__":
    options = parser().parse_args()
    sys.exit(options.run(options))
