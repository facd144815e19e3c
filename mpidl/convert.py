"""Convert a network between file formats: `python -m mpidl.convert SRC DST` (see --help)."""

from mpidl_command import run

if __name__ == "__main__":
    run("convert")
