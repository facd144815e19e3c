"""The options of a training run, defined once for Python, the command line and TOML files.

Each field of `TrainingOptions` has a help text and a `Rule` (see `option_types`) that defines the
valid values. `configuration` merges the values from the command line, files and other sources.
Defaults follow MATLAB's trainingOptions. This module does not import `annotations` from
`__future__`, so that help() shows the types of the options.
"""

import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeAlias, TypeVar

from mpidl.data.datastore import Datastore
from mpidl.data.storage import settings
from mpidl.data.transforms.augment import Augmenter
from mpidl.errors import UserError
from mpidl.evaluation import class_metrics
from mpidl.nn.zoo import RECIPES
from mpidl.options.declaration import (
    Rule,
    at_least,
    check_value,
    choice,
    fraction,
    nearest,
    option,
    options_class,
    rule_of,
)
from mpidl.options.declaration import flag as flag
from mpidl.training.options.image_options import ImageOptions
from mpidl.training.options.option_conflicts import check_conflicts
from mpidl.training.options.run_options import RunOptions
from mpidl.training.options.solver_options import BY_SOLVER, SOLVER_NAMES, SolverOptions
from mpidl.training.progress import Progress

Options = TypeVar("Options")
OutputFunction: TypeAlias = Callable[[Progress], object]


def _refuse_unknown(cls: type[Options]) -> type[Options]:
    """Make the constructor of a class raise UserError for a keyword that is not an option."""
    init, names = cls.__init__, vars(cls)["__dataclass_fields__"]

    @functools.wraps(init)
    def __init__(self, **options):
        for name in options:
            if name not in names:
                hint = HINTS.get(name) or nearest(name, names)
                raise UserError(f"unknown option {name}{hint}")
        init(self, **options)

    type.__setattr__(cls, "__init__", __init__)
    return cls


@_refuse_unknown
@options_class
class TrainingOptions(RunOptions, ImageOptions, SolverOptions):
    """The options of a training run.

    Options have the same names in Python, in TOML files and, as flags, on the command line. Lists
    of numbers are stored as strings in the form used on the command line: ``scale=(0.9, 1.1)``
    becomes ``"0.9,1.1"``.

    Parameters
    ----------
    augmenter : Augmenter, optional
        Random transformations of training images. This option replaces the options from flip to
        erase_value.
    validation : Datastore or (images, labels), optional
        Validation images. On the command line, the flag --validation-data sets this option.
    output_functions : function or sequence of functions
        Functions that all ranks call with a `Progress` at the start, after each iteration and
        epoch, and at the end. Training stops if any of the functions returns True.

    Raises
    ------
    UserError
        If a keyword is not an option, or if the value of an option is invalid.
    """

    seed: int = option(
        Rule(int, "between 0 and 2**63 - 1", 0, 2**63 - 1),
        "Seed of all random numbers: initial weights, splits, order and augmentation",
        default=0,
        resume="fixed",
    )
    validation_fraction: float = option(
        fraction(),
        "Fraction of the training set, taken from each class, to hold out for validation",
        default=0.0,
        resume="fixed",
        matlab="splitEachLabel",
    )
    fold: str | None = option(
        Rule(
            str,
            "I/K, such as 1/5 for the first of five folds",
            pattern=r"[1-9][0-9]{0,4}/[1-9][0-9]{0,4}",
            metavar="I/K",
            optional=True,
        ),
        "Cross-validation: divide the training set into K folds with the same mix of classes, "
        "validate on fold I and train on the others",
        default=None,
        resume="fixed",
        matlab="cvpartition",
    )
    validation_frequency: int = option(
        at_least(0),
        "Iterations between validations, if there are validation images; 0 validates at the end "
        "of each epoch",
        default=50,
        resume="fixed",
        matlab="ValidationFrequency",
    )
    validation_patience: float = option(
        at_least(1, allow_inf=True),
        "Stop after this many validations in a row without a new minimum of the validation loss",
        default=math.inf,
        resume="up",
        matlab="ValidationPatience",
    )
    output_network: Literal["last-iteration", "best-validation"] = choice(
        "Network that training returns: the network of the last iteration, or the network with the "
        "lowest validation loss",
        default="last-iteration",
        resume="fixed",
        matlab="OutputNetwork",
    )
    metrics: str | None = option(
        Rule(
            str,
            f"{class_metrics.ALL}, or names of {', '.join(class_metrics.NAMES)}",
            choices=(class_metrics.ALL,),
            pattern=rf"({'|'.join(class_metrics.NAMES)})(,({'|'.join(class_metrics.NAMES)}))*",
            metavar="NAME,NAME,...",
            optional=True,
        ),
        "Per-class or per-label metrics to record at each validation, and to print and write at "
        "the end, or all for every metric that applies to the loss",
        default=None,
    )
    batchnorm: Literal["global", "local"] = choice(
        "Compute batch-norm statistics over the whole mini-batch, or separately over each rank's "
        "share (the weights then depend on the number of ranks)",
        default="global",
        resume="fixed",
    )
    batchnorm_statistics: Literal["population", "moving"] = choice(
        "Batch-norm statistics of the trained network: computed in a final pass over the training "
        "set, or the moving averages from training",
        default="population",
        matlab="BatchNormalizationStatistics",
    )
    # These options exist in Python only and have no rule.
    augmenter: Augmenter | None = None
    validation: Datastore | None = None
    output_functions: OutputFunction | Sequence[OutputFunction] = ()

    def __post_init__(self) -> None:
        for name in NAMES:
            value, default = getattr(self, name), BY_SOLVER.get(name, {}).get(self.solver)
            value = check(name, default if value is None else value)
            object.__setattr__(self, name, default if value is None else value)
        functions = self.output_functions
        functions = (functions,) if callable(functions) else tuple(functions)
        if not all(map(callable, functions)):
            raise UserError(f"output_functions must be functions, found {functions}")
        object.__setattr__(self, "output_functions", functions)
        check_conflicts(self)

    def __repr__(self) -> str:
        """Show the options that differ from their defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default for f in fields(self)}
        defaults |= {name: by_solver.get(self.solver) for name, by_solver in BY_SOLVER.items()}
        changed = [f"{name}={v!r}" for name, v in values.items() if v != defaults[name]]
        return f"TrainingOptions({', '.join(changed)})"

    @classmethod
    def from_recipe(cls, name: str, **overrides: Any) -> "TrainingOptions":
        """Return the options for training one of the built-in networks.

        Parameters
        ----------
        name : str
            Name of the recipe, such as "digits".
        **overrides
            Options that replace options of the recipe.

        Returns
        -------
        TrainingOptions
            The options of the recipe, with the overrides.

        Raises
        ------
        UserError
            If there is no such recipe, or if the value of an option is invalid.
        """
        if name not in RECIPES:
            raise UserError(f"no recipe {name}: expected one of {', '.join(RECIPES)}")
        return cls(**{**recipe_options(name, overrides), **overrides})

    def for_ranks(self, ranks: int) -> "TrainingOptions":
        """Return options in which `batch_per_rank`, if set, determines `batch_size`.

        Parameters
        ----------
        ranks : int
            Number of ranks of the run.

        Returns
        -------
        TrainingOptions
            If `batch_per_rank` is set, a copy whose `batch_size` is `batch_per_rank` times the
            number of ranks. Otherwise these options.
        """
        if self.batch_per_rank is None:
            return self
        return replace(self, batch_size=self.batch_per_rank * ranks)

    def load(self, ranks: int) -> tuple[int, ...] | None:
        """Return the relative shares of a mini-batch at the start of training.

        Parameters
        ----------
        ranks : int
            Number of ranks.

        Returns
        -------
        tuple of int or None
            The entries of `worker_load` times 1000, one per rank. None for equal shares, with which
            "measured" also starts.

        Raises
        ------
        UserError
            If `worker_load` does not have one entry per rank, or if all entries are 0.
        """
        if self.worker_load in (None, "measured"):
            return None
        numbers = str(self.worker_load).split(",")
        load = tuple(round(1000 * float(number)) for number in numbers)
        if len(load) != ranks:
            raise UserError(
                f"--worker-load {self.worker_load}: expected a number for each of {ranks} rank(s), "
                f"found {len(load)}"
            )
        if not any(load):
            raise UserError(f"--worker-load {self.worker_load}: expected a number above 0")
        return load

    def as_dict(self) -> dict[str, Any]:
        """Return the options as a dict, without the options that exist in Python only.

        Returns
        -------
        dict
            {name: value}. A function is replaced with a string that contains its name.
        """
        values = {name: getattr(self, name) for name in NAMES}
        return {
            name: f"function {getattr(value, '__qualname__', value)}" if callable(value) else value
            for name, value in values.items()
        }


# Defaults of a run's inputs, set on the command line or in the [run] table of a TOML file.
RUN: dict[str, Any] = {
    "network": "digits",  # None if weights are given: the weight file describes the network
    "weights": None,
    "new_layer_factor": 1.0,
    "freeze_up_to": None,
    "data": "digits",
    "test_data": None,
    "test_fraction": 0.1,
    "validation_data": None,  # in Python, the option `validation`
    "colour": None,
    "resize": None,
    "cover": None,
    "centre_crop": None,
    "endpoint_url": None,
    "requests": settings.REQUESTS,
    "cache_dir": None,
    "retry_seconds": settings.RETRY_SECONDS,
    "upload": None,
    "mlflow": None,
    "wandb": None,
}
HINTS = {
    **dict.fromkeys(("world", "out", "console", "resume"), ": it is an argument of dl.train"),
    **dict.fromkeys(RUN.keys() - {"validation_data"}, ": it is an option of the command line only"),
    **dict.fromkeys(("new_layer_factor", "freeze_up_to"), ": it is an argument of dl.transfer"),
    "mlflow": ": pass dl.train(..., hooks=[dl.MLflowHook(FOLDER)])",
    "wandb": ": pass dl.train(..., hooks=[dl.WandbHook(PROJECT)])",
}
OPTIONS = {f.name: f for f in fields(TrainingOptions) if f.metadata}
NAMES = tuple(OPTIONS)


def recipe_options(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a recipe that remain valid when other options override the recipe.

    If `overrides` change the solver, the recipe's options that depend on the solver are dropped.
    These options are those in `SOLVER_NAMES`, and those whose defaults differ between the two
    solvers. The recipe's `scale_rate` is dropped if the learning rate is overridden or dropped, or
    if `linear_scaling` is set.

    Parameters
    ----------
    name : str
        Name of the network. If the network has no recipe, the result is empty.
    overrides : mapping
        Options from sources that take precedence over the recipe.
    """
    options = dict(RECIPES.get(name, {}))
    old = options.get("solver", "sgdm")
    new = overrides.get("solver", old)
    if new != old:
        names = [name for name, values in BY_SOLVER.items() if values.get(new) != values.get(old)]
        names = {*SOLVER_NAMES, *names}
        options = {key: value for key, value in options.items() if key not in names}
    rate = overrides.get("learning_rate")
    scaling = overrides.get("linear_scaling")
    if "learning_rate" not in options or rate is not None or scaling is not None:
        options.pop("scale_rate", None)
    return options


def default_text(name: str) -> str:
    """Format an option's default, such as "none" or "0.01 (sgdm), 0.001 (adam, rmsprop)"."""
    if name in BY_SOLVER:
        solvers: dict[float, list[str]] = {}
        for solver, value in BY_SOLVER[name].items():
            solvers.setdefault(value, []).append(solver)
        if len(solvers) == 1:
            return str(*solvers)
        return ", ".join(f"{value:g} ({', '.join(names)})" for value, names in solvers.items())
    default = OPTIONS[name].default
    return "none" if default is None else str(default)


def check(name: str, value: object, spelled: str | None = None, text: bool = False) -> Any:
    """Check the value of an option and convert it to the option's type.

    Parameters
    ----------
    name : str
        Name of the option.
    value : object
        The value to check.
    spelled : str, optional
        The option as the user wrote it, for the error message. The default is `name`.
    text : bool
        Whether the value comes from text, such as a command line. If true, strings such as "12" are
        converted to numbers.

    Raises
    ------
    UserError
        If the value is invalid.
    """
    return check_value(rule_of(OPTIONS[name]), value, spelled or name, text)


def _parameters():
    """Yield text for the docstring of `TrainingOptions` that documents each option."""
    indent = " " * 8
    for name, declared in OPTIONS.items():
        rule, text = rule_of(declared), declared.metadata["help"]
        kind = inspect.formatannotation(declared.type).replace("collections.abc.", "")
        if rule.choices and not rule.pattern:
            kind = f"{{{', '.join(map(repr, rule.choices))}}}"
            kind += " or function" if rule.allow_function else ""
        default = default_text(name) if name in BY_SOLVER else repr(declared.default)
        yield f"    {name} : {kind}, default {default}\n"
        yield textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent) + ".\n"


if TrainingOptions.__doc__:  # None under python -OO
    head, rule_line, tail = TrainingOptions.__doc__.partition("    ----------\n")
    TrainingOptions.__doc__ = "".join([head, rule_line, *_parameters(), tail])
