"""Report on runs: `python -m mpidl.report RUN ... --html FILE` (see --help)."""

from mpidl_command import run

if __name__ == "__main__":
    run("report")
