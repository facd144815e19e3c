"""Compare trained weights across numbers of ranks: `python -m mpidl.verify` (see --help)."""

from mpidl.cli.verify import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
