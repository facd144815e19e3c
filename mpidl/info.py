"""Show what mpidl found on this machine: `mpirun -n 4 python -m mpidl.info`."""

from mpidl.cli.info import main
from mpidl.comm import guard

if __name__ == "__main__":
    guard.run(main)
