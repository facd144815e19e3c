"""Measure and predict speed on many ranks: `python -m mpidl.scaling --ranks 1,2,4` (see --help)."""

from mpidl_command import run

if __name__ == "__main__":
    run("scaling")
