"""Declare options as fields of dataclasses, and check the values of options against their rules.

An option is declared once, in a dataclass of the room that acts on it. Its declaration has the
valid values, the default, the help text, the group of --help-all, whether a resumed run may change
it, and its name in MATLAB. The command line, TOML files, sweeps, help texts, shell completion and
the tables of docs/options.md are derived from the declarations.
"""

import inspect
import math
import numbers
import operator
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args, get_origin

from mpidl.errors import UserError

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda decorator: decorator


Options = TypeVar("Options")

ON_OFF = ("on", "off")
# In Python and TOML, False selects one of these choices if the flag may stand without a value, and
# True the value of this flag.
FALSE = ("off", "none")
Size: TypeAlias = str | int | Sequence[int] | None  # "224x192", 224 or (224, 192)
Resume: TypeAlias = Literal["free", "fixed", "up"]


class Rule(NamedTuple):
    """The valid values of an option."""

    kind: type  # int, float or str
    requirement: str  # describes the valid values for error messages, such as "at least 1"
    low: float = -math.inf
    high: float = math.inf
    exclude_low: bool = False
    exclude_high: bool = False
    or_zero: bool = False  # 0 is valid in addition to the numbers from `low` to `high`
    choices: tuple[str, ...] = ()
    pattern: str = ""  # of valid strings that are not among `choices`
    metavar: str = "N,N,..."  # placeholder in --help for a string that matches the pattern
    suggestions: tuple[str, ...] = ()  # strings that shell completion offers in addition
    separator: str = ""  # of a list such as "2,4", which Python and TOML may give as a sequence
    optional: bool = False  # None is valid, which TOML and the command line write as "none"
    allow_inf: bool = False  # even if `kind` is int
    allow_function: bool = False
    bare: int | str | None = None  # value of a flag without a value; None if one is required


TEXT = Rule(str, "a text", pattern="(?s).*")


def text_or_none(metavar: str, *suggestions: str) -> Rule:
    """Return the rule for any text, such as a path, or None."""
    return TEXT._replace(metavar=metavar, suggestions=suggestions, optional=True)


def at_least(low: int, *, optional: bool = False, allow_inf: bool = False) -> Rule:
    """Return the rule for integers that are at least `low`."""
    requirement = f"at least {low}" + (", or inf" if allow_inf else "")
    return Rule(int, requirement, low, optional=optional, allow_inf=allow_inf)


def number_list(requirement: str) -> Rule:
    """Return the rule for lists of non-negative integers, or None."""
    return Rule(str, requirement, pattern=r"[0-9]+(,[0-9]+)*", separator=",", optional=True)


def positive(*, optional: bool = False, allow_inf: bool = False) -> Rule:
    """Return the rule for numbers above 0."""
    return Rule(float, "positive", 0, exclude_low=True, optional=optional, allow_inf=allow_inf)


def fraction(*, optional: bool = False) -> Rule:
    """Return the rule for numbers that are at least 0 and below 1."""
    return Rule(float, "at least 0 and below 1", 0, 1, exclude_high=True, optional=optional)


def factor() -> Rule:
    """Return the rule for numbers that are above 0 and at most 1."""
    return Rule(float, "above 0 and at most 1", 0, 1, exclude_low=True)


def one_of(*choices: str, allow_function: bool = False, optional: bool = False) -> Rule:
    """Return the rule for an option whose value is one of a fixed set of names."""
    return Rule(
        str,
        either(choices),
        choices=choices,
        allow_function=allow_function,
        optional=optional,
        bare="on" if choices == ON_OFF else None,
    )


def either(names: Sequence[str]) -> str:
    """Return the names as text: "a, b or c"."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


SIZE = Rule(
    str,
    "HEIGHTxWIDTH such as 224x192, or 224",
    pattern=r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})?",
    metavar="HxW",
    separator="x",
    optional=True,
)


def numbers_of(rule: Rule, value: Any) -> Any:
    """Return the tuple of numbers that a checked string stands for, or any other value unchanged.

    A size has two whole numbers.
    """
    if not rule.separator or value is None or value in rule.choices:
        return value
    if rule is SIZE:
        sides = [int(side) for side in value.split("x")]
        return sides[0], sides[-1]
    return tuple(map(float, value.split(rule.separator)))


def option(
    rule: Rule | None,
    text: str,
    *,
    default: object,
    group: str | None = None,
    resume: Resume | None = None,
    matlab: str = "",
    default_help: str | None = None,
    python: str = "",
) -> Any:
    """Declare an option as a field of an `options_class`.

    Parameters
    ----------
    rule : Rule or None
        The valid values. If None, the names in the annotation's `Literal` are valid, and functions
        if the annotation has `Callable`.
    text : str
        Help text.
    default : object
        The value if no source, such as the command line, sets the option. Pass this argument by
        keyword, because type checkers and editors look for the keyword `default`.
    group, resume : str, optional
        Replacements for the arguments of `options_class`.
    matlab : str
        Name of the option in MATLAB.
    default_help : str, optional
        The default in --help; "" shows none. By default, the text of `default`.
    python : str
        How a Python program sets an option that is not a field of `TrainingOptions`.
    """
    facts = {"rule": rule, "help": text, "matlab": matlab, "python": python}
    facts["default_help"] = default_help
    replacements = {"group": group, "resume": resume}
    facts |= {name: value for name, value in replacements.items() if value is not None}
    return field(default=default, metadata=facts)


def choice(text: str, *, default: object, **facts: Any) -> Any:
    """Declare an option whose valid values are the names in its `Literal` annotation."""
    return option(None, text, default=default, **facts)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, choice))
def options_class(
    *, group: str, resume: Resume = "free"
) -> Callable[[type[Options]], type[Options]]:
    """Return a decorator that turns a class into a frozen dataclass with keyword-only options.

    `group` is the title of the options in --help-all. `resume` tells whether a resumed run may
    change the options, must keep them ("fixed"), or may only increase them ("up"). The module of
    the class must not import `annotations` from `__future__`, so that help() shows the types.
    """

    def decorate(cls: type[Options]) -> type[Options]:
        for name, value in dict(vars(cls)).items():  # Python 3.14 adds entries for annotations
            if isinstance(value, Field) and value.metadata:
                facts = {"group": group, "resume": resume, **value.metadata}
                facts["rule"] = facts["rule"] or _literal_rule(cls.__annotations__[name])
                value.metadata = MappingProxyType(facts)
        return dataclass(frozen=True, kw_only=True)(cls)

    return decorate


def _literal_rule(annotation):
    """Return the rule for the names in the `Literal` of an annotation."""
    kinds = [get_origin(kind) for kind in get_args(annotation)]
    literal = annotation
    if Literal in kinds:
        literal = get_args(annotation)[kinds.index(Literal)]
    return one_of(*get_args(literal), allow_function=Callable in kinds)


def declared(cls: type) -> dict[str, Field]:
    """Return {name: declaration} of the options of an `options_class`, in their order."""
    return {f.name: f for f in fields(cls) if f.metadata}


def rule_of(declaration: Field) -> Rule:
    """Return the rule of an option."""
    return declaration.metadata["rule"]


def default_text(declaration: Field) -> str:
    """Return the default of an option as --help shows it, or "" if --help shows none."""
    text, default = declaration.metadata["default_help"], declaration.default
    return text if text is not None else "none" if default is None else str(default)


def parameter_text(declaration: Field, text: str, default: str) -> str:
    """Return the entry of an option in the section Parameters of a docstring."""
    rule, indent = rule_of(declaration), " " * 8
    kind = inspect.formatannotation(declaration.type).replace("collections.abc.", "")
    if rule.choices and not rule.pattern:
        kind = f"{{{', '.join(map(repr, rule.choices))}}}"
        kind += " or function" if rule.allow_function else ""
    lines = textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent)
    return f"    {declaration.name} : {kind}, default {default}\n{lines}.\n"


def check_value(rule: Rule, value: object, spelled: str, text: bool = False) -> Any:
    """Return a value converted to the type of a rule; raise UserError if it is invalid.

    `spelled` is the option as the user wrote it, for the message. If `text`, the value comes from a
    command line, where strings such as "12" stand for numbers.
    """
    if rule.optional and (value is None or value == "none"):
        return None
    if rule.allow_function and callable(value):
        return value
    if isinstance(value, bool) and rule.bare in rule.choices:
        value = rule.bare if value else next(name for name in FALSE if name in rule.choices)
    several = value if isinstance(value, list | tuple) else [value]
    if rule.separator and all(map(_is_number, several)):
        converted = rule.separator.join(map(str, several))
    else:
        converted = _convert(rule, value, text)
    if converted is None or not (converted in rule.choices or _fits(rule, converted)):
        kind = {int: "a whole number, ", float: "a number, ", str: ""}[rule.kind]
        kind = "" if converted is not None or rule.requirement.startswith("a ") else kind
        try:
            shown_value = repr(value) if isinstance(value, str) and not text else str(value)
            if "\n" in shown_value and not isinstance(value, str):  # such as arrays
                shown_value = f"a {type(value).__name__}"
        except RecursionError:  # deeply nested lists
            shown_value = f"a {type(value).__name__} that is nested too deeply"
        raise UserError(f"{spelled} must be {kind}{rule.requirement}, found {shown_value}")
    return converted


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _convert(rule, value, text):
    """Return the value converted to the rule's type (int, float or str), or None if that fails."""
    if rule.kind is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or (isinstance(value, str) and not text):
        return None
    try:
        if rule.kind is int and not (rule.allow_inf and float(value) == math.inf):
            return int(value) if isinstance(value, str) else operator.index(value)
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _fits(rule, converted):
    """Return whether a converted value is within the rule's bounds or matches its pattern."""
    if rule.kind is str:
        return bool(rule.pattern) and re.fullmatch(rule.pattern, converted) is not None
    if rule.or_zero and converted == 0:
        return True
    low = converted > rule.low if rule.exclude_low else converted >= rule.low
    high = converted < rule.high if rule.exclude_high else converted <= rule.high
    try:
        finite = math.isfinite(converted) or (rule.allow_inf and converted == math.inf)
    except OverflowError:  # an integer above the largest float
        return False
    return finite and low and high


def flag(name: str) -> str:
    """Return the command-line flag of an option: "--batch-size" for "batch_size"."""
    return "--" + name.replace("_", "-")
