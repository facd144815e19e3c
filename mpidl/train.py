"""Train a network: `mpirun -n 4 python -m mpidl.train` (see --help)."""

from mpidl.cli.train import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
