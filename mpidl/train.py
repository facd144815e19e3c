"""Train a network: `mpirun -n 4 python -m mpidl.train`; --help lists the options."""

from mpidl.cli.train import main
from mpidl.comm import guard

if __name__ == "__main__":
    guard.run(main)
