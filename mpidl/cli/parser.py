"""The parser of the commands: one-line errors, flags of training options, and types of values."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mpidl.errors import UserError
from mpidl.training.options import configuration, training_options
from mpidl.training.options.option_types import check_value

MAX_CHOICES = 40  # longest list of choices, in characters, that --help shows after a flag


class _Formatter(argparse.HelpFormatter):
    """Wraps each paragraph of a description or an epilog to the width of the terminal."""

    def _fill_text(self, text, width, indent):
        fill = super()._fill_text
        return "\n\n".join(fill(part, width, indent) for part in text.split("\n\n"))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises one-line UserErrors and accepts no abbreviated flags.

    Parameters
    ----------
    command : str
        Name of the module after ``python -m``.
    description : str
        Text at the top of --help.
    quiet : bool
        Whether --help ends the program without printing, as on all ranks but 0.
    **keywords
        Other arguments of ArgumentParser.
    """

    def __init__(self, command: str, description: str, quiet: bool, **keywords: Any):
        super().__init__(
            prog=f"python -m {command}",
            description=description,
            formatter_class=_Formatter,
            allow_abbrev=False,
            **keywords,
        )
        self.quiet = quiet

    def error(self, message):
        """Raise the message of argparse as a UserError."""
        raise UserError(message.removeprefix("argument "))

    def print_help(self, file=None):
        """Print the help unless the parser is quiet."""
        if not self.quiet:
            super().print_help(file)

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse a command line.

        Parameters
        ----------
        argv : sequence of str, optional
            The arguments; by default sys.argv[1:].

        Raises
        ------
        UserError
            If an argument has an invalid value or is unknown. For an unknown option, the message
            suggests the most similar one.
        """
        argv = sys.argv[1:] if argv is None else list(argv)
        flags = [text for action in self._actions for text in action.option_strings]
        for text in argv:
            name = text.partition("=")[0]
            if name == "--":
                break
            if name == "--ranks" and name not in flags:
                raise UserError(
                    "unknown option --ranks: set the number of ranks with mpirun -n N, or with "
                    "MPIDL_RANKS for run/train"
                )
            if name.startswith("--") and name not in flags:
                raise UserError(f"unknown option {name}{training_options.nearest(name, flags)}")
        arguments, extra = self.parse_known_args(argv)
        if extra:
            raise UserError(f"unexpected argument {extra[0]} (--help lists the options)")
        return arguments

    def text(self, flag: str, metavar: str, text: str, **keywords: Any) -> None:
        """Add a flag with a value and the help `text`; pass `keywords` to add_argument."""
        self.add_argument(flag, metavar=metavar, help=text, **keywords)

    def add_options(self, *names: str, **defaults: object) -> None:
        """Add flags for training options; `defaults` replace the defaults that --help shows."""
        for name in names:
            default = str(defaults.get(name, training_options.default_text(name)))
            self.add(name, training_options.OPTIONS[name].metadata["help"], default)

    def add(self, name: str, text: str, default: str = "none") -> None:
        """Add the flag of an option in `configuration.RULES`.

        Parameters
        ----------
        name : str
            Name of the option, a key of `configuration.RULES`.
        text : str
            Help text.
        default : str
            The default that --help shows.
        """
        rule = configuration.RULES[name]
        choices = "|".join([*rule.choices, *([rule.metavar] if rule.pattern else [])])
        if len(choices) > MAX_CHOICES:
            text, choices = f"{text}. NAME is {_either(rule.choices)}", "NAME"
        self.add_argument(
            training_options.flag(name),
            type=lambda value: check_value(rule, value, training_options.flag(name), text=True),
            metavar=choices or {int: "N", float: "X"}[rule.kind],
            help=f"{text}; default: {default}",
            default=argparse.SUPPRESS,
        )


def _either(names):
    return f"{', '.join(names[:-1])} or {names[-1]}"


def count(spelled: str) -> Callable[[str], int]:
    """Return a function that converts a string to an integer of at least 1.

    `spelled` is the flag that error messages name.
    """

    def convert(text):
        return training_options.check("epochs", text, spelled, text=True)

    return convert


def image_shape(text: str) -> tuple[int, ...]:
    """Convert the value C,H,W of --input-shape to a tuple of three integers."""
    sides = [
        training_options.check("epochs", part, "--input-shape", text=True)
        for part in text.split(",")
    ]
    if len(sides) != 3:
        raise UserError(f"--input-shape must be C,H,W, such as 3,227,227, found {text}")
    return tuple(sides)


def rank_counts(text: str) -> list[int]:
    """Convert the value N,N,... of --ranks to a list of integers."""
    try:
        return [
            training_options.check("epochs", part, "--ranks", text=True) for part in text.split(",")
        ]
    except UserError:
        raise UserError(f"--ranks must be numbers of ranks such as 1,2,3, found {text}") from None
