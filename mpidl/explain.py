"""Explain the decisions of a network: `mpirun -n 2 python -m mpidl.explain MODEL IMAGES`."""

from mpidl_command import run

if __name__ == "__main__":
    run("explain")
