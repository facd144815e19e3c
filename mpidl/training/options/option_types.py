"""How an option is declared: what its value must be, and how a text becomes one."""

import math
import numbers
import operator
import re
from dataclasses import field
from typing import NamedTuple

from mpidl.errors import UserError
from mpidl.text import did_you_mean

ON_OFF = ("on", "off")  # of an option that takes True and False too, in Python and TOML


class Rule(NamedTuple):
    """What a value must be: of this kind, and between the bounds."""

    kind: type  # int, float or str
    words: str  # "at least 1", as the error says it
    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # low itself is refused
    below: bool = False  # high itself is refused
    choices: tuple = ()
    pattern: str = ""  # of a text that is not one of the choices
    shape: str = "N,N,..."  # what --help writes for such a text
    joint: str = ""  # what makes such a text of numbers, one or a list, in Python and TOML
    optional: bool = False  # None will do; files and the command line write "none"
    infinite: bool = False  # inf will do, for a whole number too
    function: bool = False  # a function will do, in the library


def at_least(low, *, optional=False, infinite=False):
    words = f"at least {low}" + (", or inf" if infinite else "")
    return Rule(int, words, low, optional=optional, infinite=infinite)


def numbers_of(words):
    return Rule(str, words, pattern=r"[0-9]+(,[0-9]+)*", joint=",", optional=True)


def positive(*, optional=False, infinite=False):
    return Rule(float, "positive", 0, above=True, optional=optional, infinite=infinite)


def share(low=0, high=1, *, optional=False):
    """At least `low` and below 1."""
    return Rule(float, f"at least {low} and below {high}", low, high, below=True, optional=optional)


def one_of(*choices, function=False, optional=False):
    words = ", ".join(choices[:-1]) + f" or {choices[-1]}"
    return Rule(str, words, choices=choices, function=function, optional=optional)


SIZE = Rule(
    str,
    "HEIGHTxWIDTH such as 224x192, or 224",
    pattern=r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})?",
    shape="HxW",
    joint="x",
    optional=True,
)


def size_of(text):
    """(height, width) of what SIZE takes; None of None."""
    if text is None:
        return None
    sides = [int(side) for side in text.split("x")]
    return sides[0], sides[-1]


def option(default, rule, text, *, resume="free", matlab=""):
    """A field of TrainingOptions. `resume`: "free" to change, "fixed", or may only go "up";
    matlab: what MATLAB calls it."""
    facts = {"rule": rule, "help": text, "resume": resume, "matlab": matlab}
    return field(default=default, metadata=facts)


def checked(rule, value, spelled, text=False):
    """The value in its proper type, or a UserError that calls it `spelled`; see `options.check`."""
    if rule.optional and (value is None or value == "none"):
        return None
    if rule.function and callable(value):
        return value
    if rule.choices == ON_OFF and isinstance(value, bool):
        value = "on" if value else "off"
    several = value if isinstance(value, list | tuple) else [value]
    if rule.joint and all(map(_is_number, several)):
        number = rule.joint.join(map(str, several))
    else:
        number = _convert(rule, value, text)
    if number is None or not (number in rule.choices or _fits(rule, number)):
        kind = {int: "a whole number, ", float: "a number, ", str: ""}[rule.kind]
        kind = kind if number is None else ""
        found = repr(value) if isinstance(value, str) and not text else value
        raise UserError(f"{spelled} must be {kind}{rule.words}, found {found}")
    return number


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _convert(rule, value, text):
    """The value as an int, float or str; None where it is none."""
    if rule.kind is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or (isinstance(value, str) and not text):
        return None
    try:
        if rule.kind is int and not (rule.infinite and float(value) == math.inf):
            return int(value) if isinstance(value, str) else operator.index(value)
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _fits(rule, number):
    """Whether a number is between the bounds, or a text of the pattern."""
    if rule.kind is str:
        return bool(rule.pattern) and re.fullmatch(rule.pattern, number) is not None
    low = number > rule.low if rule.above else number >= rule.low
    high = number < rule.high if rule.below else number <= rule.high
    finite = math.isfinite(number) or (rule.infinite and number == math.inf)
    return finite and low and high


# What MATLAB and others call an option, without case, dashes and underscores.
ELSEWHERE = {
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


def nearest(name, known):
    """Return ": did you mean X?" for an option, by its names in MATLAB and elsewhere too."""
    return did_you_mean(name, known, ELSEWHERE)
