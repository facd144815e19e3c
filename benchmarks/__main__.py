"""Run the benchmarks of a checkout, for example `python -m benchmarks compare`."""

from benchmarks import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
