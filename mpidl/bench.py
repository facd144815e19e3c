"""Measure: `mpirun -n 2 python -m mpidl.bench fold`."""

from mpidl.cli.bench import main
from mpidl.comm import guard

if __name__ == "__main__":
    guard.run(main)
