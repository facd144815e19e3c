"""Show runs live in a browser: `python -m mpidl.monitor RUN [RUN ...]` (see --help)."""

from mpidl.cli.monitor import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
