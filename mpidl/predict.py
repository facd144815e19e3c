"""Classify images with a trained network: `mpirun -n 4 python -m mpidl.predict --help`."""

from mpidl.cli.predict import main
from mpidl.comm import guard

if __name__ == "__main__":
    guard.run(main)
