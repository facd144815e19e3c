"""Pack images into one file: `python -m mpidl.pack photos photos.h5`; --help lists the options."""

from mpidl.cli.pack import main
from mpidl.comm import failure

if __name__ == "__main__":
    failure.run(main)
