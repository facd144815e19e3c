"""The argument parser of all commands: one-line errors, training options, and types of values."""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from mpidl.errors import UserError
from mpidl.options.declaration import Rule, at_least, check_value, either, flag, rule_of
from mpidl.training.optimizers.solvers import help_text, shown_default
from mpidl.training.options.configuration import DECLARED
from mpidl.training.options.run_inputs import PACK
from mpidl.training.options.training_options import nearest

COMMON = "Common options"
UNGROUPED = "Other options"
RUN = "Run and results"
# Titles of groups of options, in the order in which --help shows them.
GROUPS = (
    RUN,
    "Images",
    "Large images",
    "Augmentation",
    "Study",
    "Object stores",
    "Start from weights",
    "Length and mini-batches",
    "Solver",
    "Learning rate schedule",
    "Validation",
    "Hardware and speed",
    "Progress",
)
PORT = Rule(int, "a whole number from 0 to 65535", 0, 65535)
COUNTS = Rule(str, "numbers of ranks such as 1,2,3", pattern="[1-9][0-9]*(,[1-9][0-9]*)*")
SHAPE = Rule(str, "C,H,W, such as 3,227,227", pattern="[1-9][0-9]*(,[1-9][0-9]*){2}")
SHORT_LIST = 13  # a command with more options than this has a short --help
MAX_CHOICES = 40  # longest list of choices, in characters, that --help shows after a flag


class _Formatter(argparse.HelpFormatter):
    """Wraps paragraphs, and lines that begin with a space, to the width of the terminal."""

    def _fill_text(self, text, width, indent):
        lines = re.sub(r"(?<!\n)\n(?![ \n])", " ", text.strip("\n")).split("\n")
        return "\n".join(
            textwrap.fill(
                line,
                width,
                subsequent_indent="    " if line.startswith(" ") else "",
                break_on_hyphens=False,
            )
            for line in lines
        )


class _Help(argparse.Action):
    """Prints the help, short for --help or complete for --help-all, and exits."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.is_complete = option_string == "--help-all"
        parser.print_help()
        parser.exit()


class ParserReady(Exception):
    """Raised by `Parser.parse` for `DESCRIBE`. Its argument is the parser with all options."""


DESCRIBE = ("--describe",)  # with this command line, `Parser.parse` raises ParserReady


def typed_command(module: str) -> str:
    """Return a command as the user typed it: "mpidl train" or "python -m mpidl.train"."""
    folder, program = os.path.split(sys.argv[0])
    package, _, name = module.partition(".")
    if package == "mpidl" and program == "mpidl":
        return f"mpidl {name}"
    if package == "mpidl" and program == "__main__.py" and os.path.basename(folder) == "mpidl":
        return f"python -m mpidl {name}"
    return f"python -m {module}"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises one-line UserErrors and accepts no abbreviated flags.

    `command` is the name of the module after ``python -m``. If `quiet`, as on all ranks except rank
    0, --help exits without printing. `common` names the most common options, which --help shows
    first. If the command has many options, --help explains only these, and --help-all explains all.
    `group` is the title of options that are added without a group.
    """

    def __init__(
        self,
        command: str,
        description: str,
        quiet: bool,
        common: Sequence[str] = (),
        group: str = UNGROUPED,
        **keywords: Any,
    ):
        super().__init__(
            prog=typed_command(command),
            description=description,
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
            **keywords,
        )
        self.quiet, self.common, self.group, self.is_complete = quiet, common, group, False
        self.suggestions: dict[str, Sequence[str]] = {}  # {flag: values that a shell completes}
        self.groups: dict[str, str] = {}  # {destination of an option: title of its group}
        for flags in (("-h", "--help"), ("--help-all",)):
            self.add_argument(*flags, action=_Help, nargs=0, dest="help", default=argparse.SUPPRESS)

    @property
    def options(self) -> list[argparse.Action]:
        """The options of the command, without --help and positional arguments."""
        flags = [action for action in self._actions if action.option_strings]
        return [action for action in flags if not isinstance(action, _Help)]

    @property
    def operands(self) -> list[argparse.Action]:
        """The positional arguments of the command."""
        return [action for action in self._actions if not action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Raise the message of argparse as a UserError."""
        raise UserError(message.removeprefix("argument "))

    def print_help(self, file: Any = None) -> None:
        """Print the help unless the parser is quiet."""
        if not self.quiet:
            super().print_help(file)

    def format_help(self) -> str:
        """Return the help: the most common options, or all options in groups."""
        sections = self.sections()
        is_long = self.common and len(self.options) > SHORT_LIST
        is_short = is_long and not self.is_complete
        formatter = self._get_formatter()
        formatter.add_usage(self.usage or self._usage(), (), ())
        formatter.add_text(self.description)
        _add_section(formatter, "Arguments", self.operands)
        for title, actions in sections.items():
            if title == COMMON or not is_short:
                _add_section(formatter, title, actions)
        if is_short:
            del sections[COMMON]
            formatter.add_text(_flag_lists(sections))
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def sections(self) -> dict[str, list[argparse.Action]]:
        """Return {title: options} of --help-all, without empty groups, in the order of `GROUPS`.

        Within a group, options keep the order in which they were added. A command with few options
        has a single group.
        """
        if not self.common and len(self.options) <= SHORT_LIST:
            return {"Options": self.options} if self.options else {}
        sections: dict[str, list[argparse.Action]] = {}
        for title in (COMMON, *GROUPS, UNGROUPED):
            sections[title] = [a for a in self.options if self._title(a.dest) == title]
        sections[COMMON].sort(key=lambda action: self.common.index(action.dest))
        return {title: members for title, members in sections.items() if members}

    def _title(self, name):
        return COMMON if name in self.common else self.groups[name]

    def _usage(self):
        """Return the usage: required options and arguments, and a placeholder for the rest."""
        words = [self.prog]
        for action in self.operands:
            words.append(f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar))
        for action in self.options:
            words += [f"{action.option_strings[0]} {action.metavar}"] if action.required else []
        return " ".join([*words, "[OPTION VALUE] ..."] if self.options else words)

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse a command line, by default sys.argv[1:].

        A UserError about an unknown option suggests the most similar option.
        """
        if argv is DESCRIBE:
            raise ParserReady(self)
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
                raise UserError(f"unknown option {name}{nearest(name, flags)}")
        arguments, extra = self.parse_known_args(argv)
        if extra:
            raise UserError(f"unexpected argument {extra[0]} (--help lists the options)")
        return arguments

    def add_argument(self, *names: str, group: str = "", **keywords: Any) -> argparse.Action:
        """Add an argument to a group, by default to the group of the parser.

        `type` may be a `Rule`, which then checks and converts the value.
        """
        if isinstance(rule := keywords.get("type"), Rule):
            keywords["type"] = partial(check_value, rule, spelled=names[0], text=True)
        action = super().add_argument(*names, **keywords)
        self.groups[action.dest] = group or self.group
        return action

    def text(
        self, flag: str, metavar: str, text: str, suggestions: Iterable[str] = (), **keywords: Any
    ) -> None:
        """Add a flag with a value and the help `text`; pass `keywords` to add_argument.

        `suggestions` are the values that shell completion offers; other values are allowed too.
        """
        self.suggestions[flag] = tuple(suggestions) or tuple(keywords.get("choices", ()))
        self.add_argument(flag, metavar=metavar, help=text, **keywords)

    def number(self, flag: str, text: str, *, metavar: str = "N", **keywords: Any) -> None:
        """Add a flag whose value is an integer of at least 1."""
        self.text(flag, metavar, text, type=at_least(1), **keywords)

    def switch(self, flag: str, text: str, **keywords: Any) -> None:
        """Add a flag without a value."""
        self.add_argument(flag, action="store_true", help=text, **keywords)

    def add_options(self, *names: str, **replaced: object) -> None:
        """Add the flags of declared options; `replaced` has other defaults for --help to show.

        Options that the user did not type are missing in the result.
        """
        for declaration in map(DECLARED.__getitem__, names):
            rule, text = rule_of(declaration), help_text(declaration)
            text = text.replace(PACK, typed_command("mpidl.pack"))
            choices = "|".join([*rule.choices, *([rule.metavar] if rule.pattern else [])])
            if len(choices) > MAX_CHOICES:
                text, choices = f"{text}. NAME is {either(rule.choices)}", "NAME"
            default = replaced.get(declaration.name, shown_default(declaration))
            self.text(
                flag(declaration.name),
                choices or {int: "N", float: "X"}[rule.kind],
                f"{text}; default: {default}" if default != "" else text,
                (*rule.choices, *rule.suggestions),
                group=declaration.metadata["group"],
                type=rule,
                default=argparse.SUPPRESS,
                **({} if rule.bare is None else {"nargs": "?", "const": rule.bare}),
            )


def _add_section(formatter, title, actions):
    if actions:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()


def _flag_lists(sections):
    """Return a line of flags for each section, without help texts."""
    lines = [
        f"  {title}: {' '.join(action.option_strings[0] for action in actions)}"
        for title, actions in sections.items()
    ]
    return "\n".join(["Other options, which --help-all explains:", *lines])


def image_shape(text: str) -> tuple[int, ...]:
    """Convert the value C,H,W of --input-shape to a tuple of three integers."""
    return tuple(map(int, check_value(SHAPE, text, "--input-shape", text=True).split(",")))


def rank_counts(text: str, flag: str = "--ranks", limit: int | None = None) -> list[int]:
    """Convert the value N,N,... of an option to a list of integers, each at most `limit`."""
    counts = [int(number) for number in check_value(COUNTS, text, flag, text=True).split(",")]
    if limit is not None and max(counts) > limit:
        raise UserError(f"{flag}: expected at most {limit} ranks, found {max(counts)}")
    return counts
