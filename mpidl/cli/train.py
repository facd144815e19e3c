"""`python -m mpidl.train`: train a network, test it, and write the results to a folder."""

from collections.abc import Sequence

from mpidl.cli import arguments
from mpidl.ranks import failure


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    typed = arguments.train(argv, quiet=failure.launched_rank() > 0)
    from mpidl.cli import train_run  # not needed for --help

    return train_run.run(typed)
