"""Declare options, check the values of options, and convert text to the type of an option."""

import math
import numbers
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from mpidl.errors import UserError
from mpidl.text import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda decorator: decorator


Options = TypeVar("Options")

ON_OFF = ("on", "off")  # options with these choices also accept True and False in Python and TOML
Size: TypeAlias = str | int | Sequence[int] | None  # "224x192", 224 or (224, 192)


class Rule(NamedTuple):
    """The valid values of an option.

    Attributes
    ----------
    kind : type
        Type of the value: int, float or str.
    requirement : str
        Description of the valid values for error messages, such as "at least 1".
    low, high : float
        Lowest and highest valid number.
    exclude_low, exclude_high : bool
        Whether `low` or `high` itself is invalid.
    choices : tuple of str
        The valid names, if the option accepts names.
    pattern : str
        Regular expression for valid strings that are not among `choices`; "" if there are none.
    metavar : str
        Placeholder in --help for a string that matches the pattern.
    separator : str
        The separator between the numbers of a list such as "2,4"; "" if the value is not a list. In
        Python and TOML, such an option also accepts a sequence of numbers.
    optional : bool
        Whether None is valid. TOML files and the command line write None as "none".
    allow_inf : bool
        Whether inf is valid, even if `kind` is int.
    allow_function : bool
        Whether a Python function is valid.
    bare : int, str or None
        The option's value if the flag has no value on the command line. None if a value is
        required.
    """

    kind: type
    requirement: str
    low: float = -math.inf
    high: float = math.inf
    exclude_low: bool = False
    exclude_high: bool = False
    choices: tuple[str, ...] = ()
    pattern: str = ""
    metavar: str = "N,N,..."
    separator: str = ""
    optional: bool = False
    allow_inf: bool = False
    allow_function: bool = False
    bare: int | str | None = None


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
    requirement = ", ".join(choices[:-1]) + f" or {choices[-1]}"
    return Rule(
        str,
        requirement,
        choices=choices,
        allow_function=allow_function,
        optional=optional,
        bare="on" if choices == ON_OFF else None,
    )


SIZE = Rule(
    str,
    "HEIGHTxWIDTH such as 224x192, or 224",
    pattern=r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})?",
    metavar="HxW",
    separator="x",
    optional=True,
)


def size_of(text: str | None) -> tuple[int, int] | None:
    """Convert a string that matches `SIZE` to (height, width). None stays None."""
    if text is None:
        return None
    sides = [int(side) for side in text.split("x")]
    return sides[0], sides[-1]


def option(
    rule: Rule | None,
    text: str,
    *,
    default: object,
    resume: Literal["free", "fixed", "up"] = "free",
    matlab: str = "",
) -> Any:
    """Declare an option as a field of `TrainingOptions`.

    Parameters
    ----------
    rule : Rule or None
        The valid values. If None, the annotation must be a `Literal`, and its names are valid.
    text : str
        Help text.
    default : object
        The value if no source, such as the command line, sets the option. Pass this argument by
        keyword, because type checkers and editors look for the keyword `default`.
    resume : {"free", "fixed", "up"}
        Whether a resumed run may change the option, must keep it, or may only increase it.
    matlab : str
        Name of the option in MATLAB.
    """
    facts = {"rule": rule, "help": text, "resume": resume, "matlab": matlab}
    return field(default=default, metadata=facts)


def choice(text: str, *, default: object, **facts: Any) -> Any:
    """Declare an option whose valid values are the names in its `Literal` annotation.

    See `option` for the parameters.
    """
    return option(None, text, default=default, **facts)


def rule_of(declared: Field) -> Rule:
    """Return the rule for a field that `option` or `choice` declared."""
    return declared.metadata["rule"] or one_of(*get_args(declared.type))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, choice))
def options_class(cls: type[Options]) -> type[Options]:
    """Turn a class that declares options into a frozen dataclass with keyword-only arguments."""
    return dataclass(frozen=True, kw_only=True)(cls)


def check_value(rule: Rule, value: object, spelled: str, text: bool = False) -> Any:
    """Check a value against a rule, and return it converted to the rule's type.

    Parameters
    ----------
    rule : Rule
        The valid values.
    value : object
        The value to check.
    spelled : str
        The option as the user wrote it, for the error message.
    text : bool
        Whether the value comes from text, such as a command line. If true, strings such as "12" are
        converted to numbers.

    Raises
    ------
    UserError
        If the value is invalid.
    """
    if rule.optional and (value is None or value == "none"):
        return None
    if rule.allow_function and callable(value):
        return value
    if rule.choices == ON_OFF and isinstance(value, bool):
        value = "on" if value else "off"
    several = value if isinstance(value, list | tuple) else [value]
    if rule.separator and all(map(_is_number, several)):
        converted = rule.separator.join(map(str, several))
    else:
        converted = _convert(rule, value, text)
    if converted is None or not (converted in rule.choices or _fits(rule, converted)):
        kind = {int: "a whole number, ", float: "a number, ", str: ""}[rule.kind]
        kind = kind if converted is None else ""
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
    low = converted > rule.low if rule.exclude_low else converted >= rule.low
    high = converted < rule.high if rule.exclude_high else converted <= rule.high
    try:
        finite = math.isfinite(converted) or (rule.allow_inf and converted == math.inf)
    except OverflowError:  # an integer above the largest float
        return False
    return finite and low and high


# {option name in MATLAB or another library, in lower case without dashes and underscores:
#  option name in mpidl}
SYNONYMS = {
    "accumulategradbatches": "accumulate",
    "checkpointfrequency": "checkpoint_every",
    "checkpointpath": "out",
    "dispatchinbackground": "workers",
    "executionenvironment": "device",
    "gradientaccumulationsteps": "accumulate",
    "initiallearnrate": "learning_rate",
    "l2regularization": "l2",
    "lr": "learning_rate",
    "maxepochs": "epochs",
    "minibatchsize": "batch_size",
    "optimizer": "solver",
    "preprocessingenvironment": "workers",
    "validationdata": "validation",
    "verbosefrequency": "verbose_every",
    "weightdecay": "l2",
    "nodecay": "decay_exclude",
}


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return ": did you mean X?" for the option closest to a name, or "" if none is close.

    The search includes option names of MATLAB and other libraries.
    """
    return did_you_mean(name, candidates, SYNONYMS)


def flag(name: str) -> str:
    """Return the command-line flag of an option: "--batch-size" for "batch_size"."""
    return "--" + name.replace("_", "-")
