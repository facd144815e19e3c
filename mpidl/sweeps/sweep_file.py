"""Read the TOML file of a sweep: the common options, and the options that vary between trials."""

import itertools
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpidl.core import keyed
from mpidl.data.urls import Settings, check_url
from mpidl.errors import UserError
from mpidl.files import read_toml, sha256_of_file
from mpidl.options.declaration import at_least, check_value, declared, either, one_of, rule_of
from mpidl.sweeps import ranges
from mpidl.text import did_you_mean
from mpidl.training.options.configuration import DECLARED
from mpidl.training.options.training_options import nearest

TABLES = ("train", "grid", "trial", "random", "search")
COUNT, SEED = "count", "search_seed"  # keys of [random] and [search] that are not options
# Keys of [search] that are not options, and their rules. A metric is a score of sweep_table.py.
METRICS = ("validation_accuracy", "validation_loss", "accuracy", "loss")
KEYS = {
    "sampler": one_of("tpe", "random"),
    "metric": one_of(*METRICS),
    "parallel": at_least(1),
    "pruner": one_of("none", "median", "asha"),
    "startup": at_least(1, optional=True),
    "warmup": at_least(0),
}
DEFAULTS: dict[str, Any] = {
    "sampler": "tpe",
    "parallel": 8,
    "pruner": "none",
    "startup": None,
    "warmup": 0,
}
SPELLED = ("[grid]", "[[trial]]", "[random]", "[search]")  # the tables of trials
FOLDS = "folds"  # key at the top level of the file
MAX_TRIALS = 100_000  # a file that describes more trials contains a typing error

# Options that do not affect the weights. Their values may change when a sweep is continued.
SPEED = {*declared(Settings), "gpus", "graphs", "threads", "worker_load", "workers", "prefetch"}
SPEED |= {"cache_mb", "timeout", "checkpoint_every", "verbose", "verbose_every", "plots"}

Options = dict[str, Any]


class Search(NamedTuple):
    """A search in which the results of trials decide the options of later trials.

    Attributes
    ----------
    sampler, pruner : str
        Who proposes options, and who ends trials early.
    metric : str
        The score that ranks the trials, one of `METRICS`.
    seed : int
        Seed of the sampler.
    parallel : int
        A trial knows all trials before it except for the last `parallel` - 1.
    startup : int or None
        Number of known trials from which the sampler and the pruner learn; None for their defaults.
    warmup : int
        Number of validations at the start of a trial after which no trial is pruned.
    ranges : dict
        {option: Range} in the order of the file.
    """

    sampler: str
    metric: str
    seed: int
    parallel: int
    pruner: str
    startup: int | None
    warmup: int
    ranges: dict[str, ranges.Range]

    @property
    def is_maximized(self) -> bool:
        return self.metric.endswith("accuracy")


class Sweep(NamedTuple):
    """The trials of a sweep. With `folds`, each has one trial per fold, in succession.

    The trials of a search are empty here, because their options are proposed during the sweep.
    """

    path: str
    train: Options  # {name: value} for every trial, with underscores in the names
    trials: list[Options]  # for each trial, the options that vary, which override `train`
    varied: list[str]  # names of the options that vary, in the order of the file
    folds: int | None = None  # number of folds of a cross-validation
    sha256: str = ""  # of the file
    search: Search | None = None

    def options(self, index: int) -> Options:
        """Return all options of a trial, given its index from 0."""
        return self.train | self.trials[index]


def read(path: str | os.PathLike[str]) -> Sweep:
    """Read the file of a sweep.

    The table [train] sets options for every trial. One of four other tables defines the trials:
    all combinations of the lists in [grid], one trial per table [[trial]], random trials as
    described in [random], or a search as described in [search]. If the key `folds` = K precedes
    the tables, each trial becomes K trials, with the option `fold` from 1/K to K/K, and the table
    that defines trials is optional. A UserError about the file names the table and the key.
    """
    path = os.fspath(path)
    tables = read_toml(path, path)
    folds = _folds(path, tables)
    for name in tables:
        if name not in TABLES:
            hint = did_you_mean(name, TABLES) or f": expected [train], {', '.join(SPELLED)}"
            raise UserError(f"{path}: unknown table [{name}]{hint}")
    kinds = [name for name in TABLES[1:] if name in tables]
    if len(kinds) != 1 and not (folds and not kinds):
        names = " and ".join(SPELLED[TABLES.index(kind) - 1] for kind in kinds)
        expected = f"{', '.join(SPELLED[:-1])} and {SPELLED[-1]}"
        raise UserError(f"{path}: expected one of {expected}, found {names or 'none'}")
    for name in {"train", *kinds} & tables.keys():
        is_table = isinstance(tables[name], list if name == "trial" else dict)
        if not is_table or (name == "trial" and not all(isinstance(t, dict) for t in tables[name])):
            spelled = "[[trial]] must be tables" if name == "trial" else f"[{name}] must be a table"
            raise UserError(f"{path}: {spelled}, found {tables[name]}")
    train = _checked(tables.get("train", {}), f"{path}: [train]")
    trials: list[Options] = [{}]
    search = None
    if kinds == ["search"]:
        if folds:
            raise UserError(f"{path}: {FOLDS} and [search]: expected at most one of them")
        search, count = _search(path, tables["search"])
        trials = [{} for _ in range(count)]
    elif kinds:
        make = {"grid": _grid, "trial": _listed, "random": _random}[kinds[0]]
        trials = make(path, tables[kinds[0]])
    if folds:
        if any("fold" in options for options in (train, *trials)):
            raise UserError(f"{path}: {FOLDS} = {folds} sets the option fold, found another value")
        _check_count(len(trials) * folds, path)
        trials = [t | {"fold": f"{i + 1}/{folds}"} for t in trials for i in range(folds)]
    values = [item for options in (train, *trials) for item in options.items()]
    values += [(name, v) for name, r in (search.ranges if search else {}).items() for v in r.values]
    for name, value in values:  # check URLs before they are written to a trial's files
        if isinstance(value, str):
            check_url(value, f"{path}: {name}")
    varied = list(dict.fromkeys(name for trial in trials for name in trial))
    varied = list(search.ranges) if search else varied
    return Sweep(path, train, trials, varied, folds, sha256_of_file(path), search)


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
        options[option] = check_option(option, value, f"{spelled} {name}")
    return options


def check_option(option: str, value: Any, spelled: str) -> Any:
    """Return the value of an option in the type of its rule; raise UserError if it is invalid."""
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
        choices[option] = [check_option(option, value, f"{spelled} {name}") for value in values]
    if not choices:
        raise UserError(f"{spelled} must have lists of values, found none")
    _check_count(math.prod(map(len, choices.values())), path)
    return [dict(zip(choices, row, strict=True)) for row in itertools.product(*choices.values())]


def _random(path, table):
    """Return random trials. Each number depends only on the seed, the option and the trial."""
    spelled, table = f"{path}: [random]", dict(table)
    count, seed = _count_and_seed(table, spelled, path)
    trials: list[Options] = [{} for _ in range(count)]
    for option, choices in _ranges(table, spelled).items():
        uniform = keyed.uniform(seed, f"sweep {option}", count)
        for trial, number in zip(trials, uniform, strict=True):
            trial[option] = check_option(option, choices.draw(number), f"{spelled} {option}")
    return trials


def _search(path, table):
    """Return the search that the table [search] describes, and its number of trials."""
    spelled, table = f"{path}: [search]", dict(table)
    count, seed = _count_and_seed(table, spelled, path)
    if "metric" not in table:
        raise UserError(f"{spelled} expected metric, which is {either(METRICS)}, found none")
    keys = {
        name: check_value(rule, table.pop(name), f"{spelled} {name}")
        for name, rule in KEYS.items()
        if name in table
    }
    if keys.get("pruner", "none") != "none" and not keys["metric"].startswith("validation"):
        raise UserError(
            f"{spelled} pruner {keys['pruner']} must have a metric of validation, found "
            f"{keys['metric']}"
        )
    space = _ranges(table, spelled, KEYS)
    for option, choices in space.items():
        values = [check_option(option, value, f"{spelled} {option}") for value in choices.samples()]
        if choices.kind == "choices":
            space[option] = choices._replace(values=tuple(values))
        elif isinstance(values[0], str):
            raise UserError(f"{spelled} {option} must be a list of choices, found {choices.kind}")
    return Search(**DEFAULTS | keys, seed=seed, ranges=space), count


def _count_and_seed(table, spelled, path):
    """Remove the number of trials and the seed from a table, and return them."""
    if (other := SEED.replace("_", "-")) in table:
        table[SEED] = table.pop(other)
    if COUNT not in table:
        raise UserError(f"{spelled} expected {COUNT}, the number of trials, found none")
    count = check_value(at_least(1), table.pop(COUNT), f"{spelled} {COUNT}")
    seed = check_option("seed", table.pop(SEED, 0), f"{spelled} {SEED}")
    _check_count(count, path)
    return count, seed


def _ranges(table, spelled, keys=()):
    """Return {option: Range} of a table. `keys` are other keys that the table might have had."""
    space: dict[str, ranges.Range] = {}
    for name, value in table.items():
        if name.replace("-", "_") not in DECLARED and (hint := did_you_mean(name, keys)):
            raise UserError(f"{spelled} {name}: unknown key{hint}")
        option = _option(name, spelled, space)
        space[option] = ranges.read(value, f"{spelled} {name}")
    if not space:
        raise UserError(f"{spelled} must have ranges of options, found none")
    return space
