"""Show the hardware and libraries that mpidl finds: `mpirun -n 4 python -m mpidl.info`."""

from mpidl.cli.info import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
