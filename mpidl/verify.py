"""Compare the weights on several numbers of ranks: `python -m mpidl.verify --help`."""

from mpidl.cli.verify import main
from mpidl.comm import failure

if __name__ == "__main__":
    failure.run(main)
