"""Restart a training run whenever it dies: `python -m mpidl.launch -- mpirun ...` (see --help)."""

from mpidl_command import run

if __name__ == "__main__":
    run("launch")
