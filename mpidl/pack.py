"""Pack images into one file: `python -m mpidl.pack photos photos.h5`; --help lists the options."""

from mpidl.cli.pack import main
from mpidl.comm import guard

if __name__ == "__main__":
    guard.run(main)
