"""The declaration of an option: which values it takes, and how text becomes one of them."""

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

ON_OFF = ("on", "off")  # choices of an option that also takes True and False in Python and TOML
Size: TypeAlias = str | int | Sequence[int] | None  # "224x192", 224 or (224, 192)


class Rule(NamedTuple):
    """The values that an option takes.

    Attributes
    ----------
    kind : type
        Type of the value: int, float or str.
    requirement : str
        The rule in words for error messages, such as "at least 1".
    low, high : float
        Bounds of a number.
    exclude_low, exclude_high : bool
        Whether to refuse the bound itself.
    choices : tuple of str
        Names that the option takes.
    pattern : str
        Regular expression of other texts that the option takes; "" if it takes the choices only.
    metavar : str
        Placeholder in --help for a text that matches the pattern.
    separator : str
        Text between the numbers of a list. Python and TOML may give such a list as numbers.
    optional : bool
        Whether None is a value. Files and the command line write it as "none".
    allow_inf : bool
        Whether inf is a value, also of a whole number.
    allow_function : bool
        Whether a function is a value, in Python.
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


def at_least(low: int, *, optional: bool = False, allow_inf: bool = False) -> Rule:
    """Return the rule of a whole number that is at least `low`."""
    requirement = f"at least {low}" + (", or inf" if allow_inf else "")
    return Rule(int, requirement, low, optional=optional, allow_inf=allow_inf)


def number_list(requirement: str) -> Rule:
    """Return the rule of a list of whole numbers, or none."""
    return Rule(str, requirement, pattern=r"[0-9]+(,[0-9]+)*", separator=",", optional=True)


def positive(*, optional: bool = False, allow_inf: bool = False) -> Rule:
    """Return the rule of a number above 0."""
    return Rule(float, "positive", 0, exclude_low=True, optional=optional, allow_inf=allow_inf)


def fraction(*, optional: bool = False) -> Rule:
    """Return the rule of a number that is at least 0 and below 1."""
    return Rule(float, "at least 0 and below 1", 0, 1, exclude_high=True, optional=optional)


def factor() -> Rule:
    """Return the rule of a number that is above 0 and at most 1."""
    return Rule(float, "above 0 and at most 1", 0, 1, exclude_low=True)


def one_of(*choices: str, allow_function: bool = False, optional: bool = False) -> Rule:
    """Return the rule of an option with a fixed set of names."""
    requirement = ", ".join(choices[:-1]) + f" or {choices[-1]}"
    return Rule(str, requirement, choices=choices, allow_function=allow_function, optional=optional)


SIZE = Rule(
    str,
    "HEIGHTxWIDTH such as 224x192, or 224",
    pattern=r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})?",
    metavar="HxW",
    separator="x",
    optional=True,
)


def size_of(text: str | None) -> tuple[int, int] | None:
    """Return (height, width) of a text that matches `SIZE`, or None for None."""
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
        The values that the option takes; None takes the names in its annotation.
    text : str
        Help text.
    default : object
        Value if no source gives one. Type checkers and editors find it by its keyword.
    resume : {"free", "fixed", "up"}
        Whether a resumed run may change the option, must keep it, or may only increase it.
    matlab : str
        Name of the option in MATLAB.
    """
    facts = {"rule": rule, "help": text, "resume": resume, "matlab": matlab}
    return field(default=default, metadata=facts)


def choice(text: str, *, default: object, **facts: Any) -> Any:
    """Declare an option that takes the names in its annotation, a `Literal`; see `option`."""
    return option(None, text, default=default, **facts)


def rule_of(declared: Field) -> Rule:
    """Return the rule of a field that `option` or `choice` declared."""
    return declared.metadata["rule"] or one_of(*get_args(declared.type))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, choice))
def options_class(cls: type[Options]) -> type[Options]:
    """Make a class with declared options a frozen dataclass of keyword arguments."""
    return dataclass(frozen=True, kw_only=True)(cls)


def check_value(rule: Rule, value: object, spelled: str, text: bool = False) -> Any:
    """Return a value in the type of its rule.

    Parameters
    ----------
    rule : Rule
        The values that the option takes.
    value : object
        The value to check.
    spelled : str
        The option as the user wrote it, for the error message.
    text : bool
        Whether the value comes from text, such as a command line, so that "12" is a number.

    Raises
    ------
    UserError
        If the option does not take the value.
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
        shown_value = repr(value) if isinstance(value, str) and not text else value
        raise UserError(f"{spelled} must be {kind}{rule.requirement}, found {shown_value}")
    return converted


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _convert(rule, value, text):
    """Return the value as an int, float or str, or None if it is not one."""
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
    """Return whether a number is within the bounds, or a text matches the pattern."""
    if rule.kind is str:
        return bool(rule.pattern) and re.fullmatch(rule.pattern, converted) is not None
    low = converted > rule.low if rule.exclude_low else converted >= rule.low
    high = converted < rule.high if rule.exclude_high else converted <= rule.high
    finite = math.isfinite(converted) or (rule.allow_inf and converted == math.inf)
    return finite and low and high


# Names of options in MATLAB and other libraries, in lower case without dashes and underscores.
SYNONYMS = {
    "checkpointfrequency": "checkpoint_every",
    "checkpointpath": "out",
    "dispatchinbackground": "workers",
    "executionenvironment": "device",
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
}


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return ": did you mean X?" for the option nearest to a name, or "" if none is near.

    Names of options in MATLAB and other libraries count as well.
    """
    return did_you_mean(name, candidates, SYNONYMS)
