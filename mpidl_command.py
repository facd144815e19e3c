"""The command `mpidl`, which runs `mpidl train` as `python -m mpidl.train` and so on."""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

command = ""  # the command that runs, for `mpidl.startup`


@functools.cache
def commands() -> dict[str, str]:
    """Return {command: what it does} of all commands, with those of the wings."""
    from mpidl.wings import WINGS  # `command` must be known before the package is imported

    return {
        "train": "Train a network",
        "predict": "Classify images, or predict numbers or pixels",
        "verify": "Check that every number of ranks gives the same weights",
        "info": "Show hardware and libraries, or the layers of a network",
        "pack": "Write a dataset into one HDF5 file",
        **{wing.command: wing.summary for wing in WINGS.values() if wing.command},
        "completion": "Print a script that completes commands in a shell",
    }


def main() -> None:
    """Run the command line in sys.argv, and end the process with the command's exit code."""
    global command
    _import_from_the_working_directory()
    name, *words = sys.argv[1:] or [""]
    if name == "help" and words:
        name, words = words[0], ["--help"]
    command = name
    if name in ("", "help", "-h", "--help"):
        print(overview())
    elif name == "--version":
        print(f"mpidl {version()}")
    elif name in commands():
        sys.argv[1:] = words
        run(name)
    else:
        _run(lambda: _refuse(name))


def run(name: str) -> None:
    """Run a command with the arguments in sys.argv, and end the process with its exit code."""
    _run(lambda: load(name)())


def load(name: str) -> Callable[..., int]:
    """Return the `main` of a command."""
    from mpidl.wings import WINGS

    modules = {wing.command: f"mpidl.{folder}.command" for folder, wing in WINGS.items()}
    return importlib.import_module(modules.get(name, f"mpidl.cli.{name}")).main


def overview() -> str:
    """Return the text that `mpidl` without arguments prints."""
    width = max(map(len, commands()))
    rows = "\n".join(f"  {name:{width}}  {text}" for name, text in commands().items())
    return (
        f"mpidl {version()}: train convolutional and recurrent networks on MPI ranks\n\n"
        "usage: mpidl COMMAND [OPTION VALUE] ...\n"
        "       mpirun -n 4 mpidl train --data photos\n\n"
        f"commands:\n{rows}\n\n"
        "mpidl COMMAND --help shows the most common options of a command, --help-all shows all.\n"
        "python -m mpidl.COMMAND is the same command."
    )


def version() -> str:
    """Return the version of the package, without importing it."""
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "mpidl", "__init__.py"), encoding="utf-8") as source:
        return source.read().partition('__version__ = "')[2].partition('"')[0]


def _import_from_the_working_directory() -> None:
    """Search the working directory instead of this script's folder, as `python -m` does.

    A user's network or layers in FILE.py may import modules beside it.
    """
    if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
        try:
            sys.path[0] = os.getcwd()
        except FileNotFoundError:  # another process has removed the folder
            sys.path[0] = ""


def _refuse(name: str) -> NoReturn:
    from mpidl.errors import UserError
    from mpidl.text import did_you_mean

    kind = "option" if name.startswith("-") else "command"
    candidates = ("--help", "--version") if kind == "option" else commands()
    hint = did_you_mean(name, candidates) or " (mpidl lists the commands)"
    raise UserError(f"unknown {kind} {name}{hint}")


def _run(command: Callable[[], int]) -> None:
    from mpidl.ranks import failure

    failure.run(command)


if __name__ == "__main__":
    import mpidl_command

    mpidl_command.main()
