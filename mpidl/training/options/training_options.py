"""The options of a training run for Python, the command line and TOML files.

`TrainingOptions` collects the options that the rooms declare next to the code that uses them (see
`mpidl.options.declaration`). `configuration` merges the values from the command line, files and
other sources. Defaults follow MATLAB's trainingOptions.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mpidl.data.loading.options import OrderOptions, ReadingOptions
from mpidl.data.transforms.options import AugmentationOptions, MixingOptions, NormalizationOptions
from mpidl.errors import UserError
from mpidl.evaluation.options import ValidationOptions
from mpidl.losses.options import LossOptions
from mpidl.nn.zoo import RECIPES
from mpidl.options.declaration import (
    check_value,
    choice,
    declared,
    numbers_of,
    options_class,
    parameter_text,
    rule_of,
)
from mpidl.options.declaration import flag as flag
from mpidl.text import did_you_mean
from mpidl.training.optimizers.options import ClipOptions, DecayOptions, SolverOptions
from mpidl.training.optimizers.solvers import (
    BY_SOLVER,
    SOLVER_NAMES,
    SolverChoice,
    help_text,
    shown_default,
)
from mpidl.training.options.option_conflicts import check_conflicts
from mpidl.training.options.run_inputs import INPUTS
from mpidl.training.options.run_options import (
    CertificateOptions,
    FailureOptions,
    LengthOptions,
    OutputOptions,
    RankOptions,
)
from mpidl.training.rank_comparison import RankComparisonOptions
from mpidl.training.schedules import ScheduleOptions
from mpidl.training.weight_average import AverageOptions

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.nn import Network
    from mpidl.training.progress import Progress

Options = TypeVar("Options")


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
@options_class(group="Solver")
class TrainingOptions(  # from the last group of options to the first
    ValidationOptions,
    CertificateOptions,
    OutputOptions,
    FailureOptions,
    RankComparisonOptions,
    RankOptions,
    ReadingOptions,
    MixingOptions,
    AugmentationOptions,
    NormalizationOptions,
    OrderOptions,
    ClipOptions,
    AverageOptions,
    DecayOptions,
    ScheduleOptions,
    SolverOptions,
    SolverChoice,
    LossOptions,
    LengthOptions,
):
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
    # These options, and `augmenter`, exist in Python only and have no rule.
    validation: "Datastore | None" = None
    output_functions: "Callable[[Progress], object] | Sequence[Callable[[Progress], object]]" = ()

    def __post_init__(self) -> None:
        for name in NAMES:
            value, default = getattr(self, name), BY_SOLVER.get(name, {}).get(self.solver)
            value = check_value(rule_of(OPTIONS[name]), default if value is None else value, name)
            object.__setattr__(self, name, default if value is None else value)
        functions = self.output_functions
        functions = tuple(functions) if isinstance(functions, Sequence) else (functions,)
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

    def loss_with_options(self) -> str | Callable[..., Any]:
        """Return the loss with its options, such as label smoothing, applied.

        Weights given as "balanced" are not resolved; see `loss_for`.

        Returns
        -------
        str or callable
            The option `loss` itself, or a loss object such as a `CrossEntropy`.

        Raises
        ------
        UserError
            If an option is set that the loss does not support.
        """
        options = {}
        for name, declaration in declared(LossOptions).items():
            value = getattr(self, name)
            if name != "loss" and value != declaration.default:
                options[name] = numbers_of(rule_of(declaration), value)
        if not options:
            return self.loss
        from mpidl.losses.named import loss_with_options  # needs the backends

        return loss_with_options(self.loss, options)

    def loss_for(
        self, net: "Network", datastore: "Datastore", world: Any = None
    ) -> str | Callable[..., Any]:
        """Return the loss with its options applied, for a training set. Collective.

        Parameters
        ----------
        net : Network
            The network.
        datastore : Datastore
            The training set, from which "balanced" weights are computed.
        world : World, optional
            The ranks that share the reading of targets. By default, this rank reads all targets.

        Returns
        -------
        str or callable
            The option `loss` itself, or a loss object such as a `CrossEntropy`.
        """
        from mpidl.losses.base import LabelLoss  # needs the backends

        loss = self.loss_with_options()
        if isinstance(loss, LabelLoss):
            return loss.for_images(datastore, net.output_shape[0], world)
        return loss

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


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return ": did you mean X?" for the option closest to a name, or "" if none is close.

    The search includes the names of options in MATLAB and other libraries.
    """
    return did_you_mean(name, candidates, SYNONYMS)


OPTIONS = declared(TrainingOptions)
NAMES = tuple(OPTIONS)
HINTS = {
    **dict.fromkeys(("world", "out", "console", "resume"), ": it is an argument of dl.train"),
    **{
        name: f": {declaration.metadata['python'] or 'it is an option of the command line only'}"
        for name, declaration in INPUTS.items()
        if name != "validation_data"  # in Python, the option `validation`
    },
}

# {name in MATLAB or another library, in lower case without underscores: name in mpidl}
SYNONYMS = {
    **{
        name.lower(): option
        for option, declaration in reversed(OPTIONS.items())  # the first option of a name remains
        for name in declaration.metadata["matlab"].split(", ")
    },
    **{"accumulategradbatches": "accumulate", "gradientaccumulationsteps": "accumulate"},
    **{
        "auditevery": "compare_ranks_every",
        "checkpointpath": "out",
        "lr": "learning_rate",
        "nodecay": "decay_exclude",
    },
    **{"optimizer": "solver", "validationdata": "validation", "weightdecay": "l2"},
}


def recipe_options(name: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a recipe that remain valid when other options override the recipe.

    If `overrides` change the solver, the recipe's options that depend on the solver are dropped:
    those in `SOLVER_NAMES`, and those whose defaults differ between the two solvers. The recipe's
    `scale_rate` is dropped if the learning rate is overridden or dropped, or if `linear_scaling` is
    set. A network without a recipe has no options.
    """
    options = dict(RECIPES.get(name or "", {}))
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


def _parameters():
    """Yield text for the docstring of `TrainingOptions` that documents each option."""
    for name, declaration in OPTIONS.items():
        has_solvers = name in BY_SOLVER
        default = shown_default(declaration) if has_solvers else repr(declaration.default)
        yield parameter_text(declaration, help_text(declaration), default)


if TrainingOptions.__doc__:  # None under python -OO
    head, rule_line, tail = TrainingOptions.__doc__.partition("    ----------\n")
    TrainingOptions.__doc__ = "".join([head, rule_line, *_parameters(), tail])
