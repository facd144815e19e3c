"""Run long trials of mpidl with random faults.

    python -m tests.soak kills --seed 1 --kills 1000 --log kills.jsonl
    python -m tests.soak kills --replay kills.jsonl --chain 17

    python -m tests.soak inputs --seed 1 --count 1000000 --log inputs.jsonl
    python -m tests.soak inputs --seed 1 --parser ONNX --first 4711 --count 1

`kills` starts a training repeatedly, and kills, stops or interrupts its processes at random moments
until the run ends (see kills.py). The log has a line of JSON per start, with the drawn values and
the results. --replay reads the drawn values from a log.

`inputs` feeds damaged files to all parsers, or to the parser that --parser names (see inputs.py).
The log has a line for each problem.

The seed determines all random values. The exit code is 0 if there were no problems, or 1 if there
were problems, which the log and the output name.
"""

import argparse
import sys
from pathlib import Path

from . import inputs, kills


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
    files = commands.add_parser("inputs", allow_abbrev=False)
    files.add_argument("--seed", type=int, default=1)
    files.add_argument("--count", type=int, default=10_000)
    files.add_argument("--parser", action="append")
    files.add_argument("--first", type=int, default=0)
    files.add_argument("--workers", type=int, default=2)
    files.add_argument("--log", type=Path, default=Path("inputs.jsonl"))
    files.set_defaults(run=inputs.main)
    return parser


if __name__ == "__main__":
    options = parser().parse_args()
    sys.exit(options.run(options))
