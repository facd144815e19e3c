"""Print a completion script for a shell: `python -m mpidl.completion bash` (see --help)."""

from mpidl.cli.completion import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
