"""Report on runs: `python -m mpidl.report RUN ... --html FILE` (see --help)."""

from mpidl.cli.report import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
