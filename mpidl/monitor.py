"""Show runs live in a browser: `python -m mpidl.monitor RUN [RUN ...]` (see --help)."""

from mpidl_command import run

if __name__ == "__main__":
    run("monitor")
