"""Read the TOML file of a sweep: the common options, and the options that vary between trials."""

import itertools
import math
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpidl.core import keyed
from mpidl.data.urls import Settings, check_url
from mpidl.errors import UserError
from mpidl.files import read_toml, sha256_of_file
from mpidl.options.declaration import at_least, check_value, declared, rule_of
from mpidl.text import did_you_mean
from mpidl.training.options.configuration import DECLARED
from mpidl.training.options.training_options import nearest

TABLES = ("train", "grid", "trial", "random")
COUNT, SEED = "count", "search_seed"  # keys of [random] that are not options
FOLDS = "folds"  # key at the top level of the file
MAX_TRIALS = 100_000  # a file that describes more trials contains a typing error
DIGITS = 6  # significant digits of random numbers; later digits depend on the C library

# Options that do not affect the weights. Their values may change when a sweep is continued.
SPEED = {*declared(Settings), "gpus", "graphs", "threads", "worker_load", "workers", "prefetch"}
SPEED |= {"cache_mb", "timeout", "checkpoint_every", "verbose", "verbose_every", "plots"}

Options = dict[str, Any]


class Sweep(NamedTuple):
    """The trials of a sweep. With `folds`, each has one trial per fold, in succession."""

    path: str
    train: Options  # {name: value} for every trial, with underscores in the names
    trials: list[Options]  # for each trial, the options that vary, which override `train`
    varied: list[str]  # names of the options that vary, in the order of the file
    folds: int | None = None  # number of folds of a cross-validation
    sha256: str = ""  # of the file

    def options(self, index: int) -> Options:
        """Return all options of a trial, given its index from 0."""
        return self.train | self.trials[index]


def read(path: str | os.PathLike[str]) -> Sweep:
    """Read the file of a sweep.

    The table [train] sets options for every trial. One of three other tables defines the trials:
    all combinations of the lists in [grid], one trial per table [[trial]], or random trials as
    described in [random]. If the key `folds` = K precedes the tables, each trial becomes K trials,
    with the option `fold` from 1/K to K/K, and the table that defines trials is optional. A
    UserError about the file names the table and the key.
    """
    path = os.fspath(path)
    tables = read_toml(path, path)
    folds = _folds(path, tables)
    for name in tables:
        if name not in TABLES:
            hint = did_you_mean(name, TABLES) or ": expected [train], [grid], [[trial]], [random]"
            raise UserError(f"{path}: unknown table [{name}]{hint}")
    kinds = [name for name in TABLES[1:] if name in tables]
    if len(kinds) != 1 and not (folds and not kinds):
        names = " and ".join("[[trial]]" if kind == "trial" else f"[{kind}]" for kind in kinds)
        raise UserError(
            f"{path}: expected one of [grid], [[trial]] and [random], found {names or 'none'}"
        )
    for name in {"train", *kinds} & tables.keys():
        is_table = isinstance(tables[name], list if name == "trial" else dict)
        if not is_table or (name == "trial" and not all(isinstance(t, dict) for t in tables[name])):
            spelled = "[[trial]] must be tables" if name == "trial" else f"[{name}] must be a table"
            raise UserError(f"{path}: {spelled}, found {tables[name]}")
    train = _checked(tables.get("train", {}), f"{path}: [train]")
    trials: list[Options] = [{}]
    if kinds:
        make = {"grid": _grid, "trial": _listed, "random": _random}[kinds[0]]
        trials = make(path, tables[kinds[0]])
    if folds:
        if any("fold" in options for options in (train, *trials)):
            raise UserError(f"{path}: {FOLDS} = {folds} sets the option fold, found another value")
        _check_count(len(trials) * folds, path)
        trials = [t | {"fold": f"{i + 1}/{folds}"} for t in trials for i in range(folds)]
    for options in (train, *trials):  # check URLs before they are written to a trial's files
        for name, value in options.items():
            if isinstance(value, str):
                check_url(value, f"{path}: {name}")
    varied = list(dict.fromkeys(name for trial in trials for name in trial))
    return Sweep(path, train, trials, varied, folds, sha256_of_file(path))


def _folds(path, tables):
    """Remove the key `folds` from the content of a file, and return its value or None."""
    if FOLDS not in tables:
        return None
    return check_value(at_least(2), tables.pop(FOLDS), f"{path}: {FOLDS}")


def _check_count(trials, path):
    """Raise UserError if a file describes too many trials, before a list of them is made."""
    if trials > MAX_TRIALS:
        raise UserError(f"{path}: expected at most {MAX_TRIALS} trials, found {trials}")


def changed_options(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the names of options that differ, except for those that affect only the speed."""
    names = [name for name in (*old, *new) if old.get(name) != new.get(name)]
    return [name for name in dict.fromkeys(names) if name not in SPEED]


def _checked(table, spelled):
    """Check a table of options, and return {name: value} with underscores in the names."""
    options = {}
    for name, value in table.items():
        option = _option(name, spelled, options)
        options[option] = _check(option, value, f"{spelled} {name}")
    return options


def _check(option, value, spelled):
    return check_value(rule_of(DECLARED[option]), value, spelled)


def _option(name, spelled, earlier):
    """Return the name of an option with underscores, which must be known and not in `earlier`."""
    option = name.replace("-", "_")
    if option not in DECLARED:
        raise UserError(f"{spelled} {name}: unknown option{nearest(option, DECLARED)}")
    if option in earlier:
        raise UserError(f"{spelled} {name}: expected {option} once, found it twice")
    return option


def _listed(path, tables):
    if not tables:
        raise UserError(f"{path}: expected at least one [[trial]], found none")
    return [_checked(table, f"{path}: [[trial]] {i + 1}:") for i, table in enumerate(tables)]


def _grid(path, table):
    """Return all combinations of the lists of values; the last option varies fastest."""
    choices, spelled = {}, f"{path}: [grid]"
    for name, values in table.items():
        option = _option(name, spelled, choices)
        if not isinstance(values, list) or not values:
            raise UserError(f"{spelled} {name} must be a list of values, found {values}")
        choices[option] = [_check(option, value, f"{spelled} {name}") for value in values]
    if not choices:
        raise UserError(f"{spelled} must have lists of values, found none")
    _check_count(math.prod(map(len, choices.values())), path)
    return [dict(zip(choices, row, strict=True)) for row in itertools.product(*choices.values())]


def _random(path, table):
    """Return random trials. Each number depends only on the seed, the option and the trial."""
    spelled, table = f"{path}: [random]", dict(table)
    if (other := SEED.replace("_", "-")) in table:
        table[SEED] = table.pop(other)
    if COUNT not in table:
        raise UserError(f"{spelled} expected {COUNT}, the number of trials, found none")
    count = check_value(at_least(1), table.pop(COUNT), f"{spelled} {COUNT}")
    seed = _check("seed", table.pop(SEED, 0), f"{spelled} {SEED}")
    if not table:
        raise UserError(f"{spelled} must have ranges of options, found none")
    _check_count(count, path)
    trials = [{} for _ in range(count)]
    for name, value in table.items():
        option = _option(name, spelled, trials[0])
        draw = _distribution(value, f"{spelled} {name}")
        uniform = keyed.uniform(seed, f"sweep {option}", count)
        for trial, number in zip(trials, uniform, strict=True):
            trial[option] = _check(option, draw(number), f"{spelled} {name}")
    return trials


def _distribution(value: Any, spelled: str) -> Callable[[np.float64], Any]:
    """Return a function that maps a number in [0, 1) to a value of the described distribution."""
    kinds = ("uniform", "log_uniform", "integers", "choices")
    if isinstance(value, list):
        value = {"choices": value}
    if not isinstance(value, dict) or len(value) != 1:
        raise UserError(
            f"{spelled} must be a list of choices or one of {{ {' = ..., '.join(kinds)} = ... }}, "
            f"found {value}"
        )
    ((kind, values),) = value.items()
    kind = kind.replace("-", "_")
    if kind not in kinds:
        hint = did_you_mean(kind, kinds) or f": expected {', '.join(kinds)}"
        raise UserError(f"{spelled}: unknown distribution {kind}{hint}")
    if kind == "choices":
        if not isinstance(values, list) or not values:
            raise UserError(f"{spelled}: choices must be a list of values, found {values}")
        return lambda number: values[int(number * len(values))]
    kind_of_number = numbers.Integral if kind == "integers" else numbers.Real
    is_range = isinstance(values, list) and len(values) == 2
    is_range = is_range and all(
        isinstance(v, kind_of_number) and not isinstance(v, bool) and math.isfinite(v)
        for v in values
    )
    if not is_range or values[0] > values[1] or (kind == "log_uniform" and values[0] <= 0):
        positive = "positive " if kind == "log_uniform" else ""
        noun = "whole numbers" if kind == "integers" else "numbers"
        raise UserError(
            f"{spelled}: {kind} must be two {positive}{noun}, the lowest and the highest, "
            f"found {values}"
        )
    low, high = values
    if kind == "integers":
        return lambda number: low + int(number * (high - low + 1))
    if kind == "uniform":
        return lambda number: _rounded(low + number * (high - low), low, high)
    return lambda number: _rounded(low * math.exp(number * math.log(high / low)), low, high)


def _rounded(value, low, high):
    return min(max(float(f"{value:.{DIGITS}g}"), low), high)
