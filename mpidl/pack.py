"""Pack images into one file: `python -m mpidl.pack photos photos.h5` (see --help)."""

from mpidl.cli.pack import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
