"""Classify images with a trained network: `mpirun -n 4 python -m mpidl.predict --help`."""

from mpidl.cli.predict import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
