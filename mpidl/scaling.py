"""Measure and predict speed on many ranks: `python -m mpidl.scaling --ranks 1,2,4` (see --help)."""

from mpidl.cli.scaling import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
