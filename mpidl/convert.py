"""Convert a network between file formats: `python -m mpidl.convert SRC DST` (see --help)."""

from mpidl.cli.convert import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
