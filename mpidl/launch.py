"""Restart a training run whenever it dies: `python -m mpidl.launch -- mpirun ...` (see --help)."""

from mpidl.cli.launch import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
