"""The options of a training run: one definition for the library, the command line and TOML files.

Each field of `TrainingOptions` carries its help text and the values it takes (`rules`). Where a
run's values come from: see `configuration`. The defaults are those of MATLAB's trainingOptions.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from mpidl.errors import UserError
from mpidl.nn.zoo import RECIPES
from mpidl.training.options.image_options import ImageOptions
from mpidl.training.options.option_types import (
    ON_OFF,
    Rule,
    at_least,
    checked,
    nearest,
    numbers_of,
    one_of,
    option,
    positive,
    share,
)
from mpidl.training.options.solver_options import BY_SOLVER, SolverOptions


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(ImageOptions, SolverOptions):
    """How to train. Raises UserError for an unknown name or a value that cannot be used."""

    seed: int = option(
        0,
        Rule(int, "between 0 and 2**63 - 1", 0, 2**63 - 1),
        "of all random numbers: weights, split and order",
        resume="fixed",
    )
    validation_fraction: float = option(
        0.0,
        share(),
        "share of the training set, of each class, that is kept for validation",
        resume="fixed",
        matlab="splitEachLabel",
    )
    validation_frequency: int = option(
        50,
        at_least(0),
        "iterations between validations, where there are images for them; 0: at the ends of epochs",
        resume="fixed",
        matlab="ValidationFrequency",
    )
    validation_patience: float = option(
        math.inf,
        at_least(1, infinite=True),
        "stop when the validation loss has not been below its least this many times in a row",
        resume="up",
        matlab="ValidationPatience",
    )
    output_network: str = option(
        "last-iteration",
        one_of("last-iteration", "best-validation"),
        "which iteration's network is the result: the last, or that of the least validation loss",
        resume="fixed",
        matlab="OutputNetwork",
    )
    batchnorm: str = option(
        "global",
        one_of("global", "local"),
        "statistics of the whole mini-batch, or of each rank's share of it, which makes the "
        "weights depend on the number of ranks",
        resume="fixed",
    )
    batchnorm_statistics: str = option(
        "population",
        one_of("population", "moving"),
        "what the trained network normalizes by: statistics of the training set, from a last pass "
        "over it, or the moving ones of training",
        matlab="BatchNormalizationStatistics",
    )
    device: str = option(
        "auto",
        one_of("auto", "cpu", "gpu"),
        "where the ranks compute; auto: on GPUs where every rank has one, else on CPUs",
        matlab="ExecutionEnvironment",
    )
    gpus: str | None = option(
        None,
        numbers_of("numbers of GPUs such as 0,2"),
        "the GPUs of each host that may be used, by their numbers among those that are visible, in "
        "the order in which its ranks take them; none: all",
        matlab="gpuDevice",
    )
    graphs: str = option(
        "auto",
        one_of("auto", "off"),
        "on GPUs: a step is recorded, and started as CUDA graphs; off: kernel by kernel",
    )
    precision: str = option(
        "fp32",
        one_of("fp32", "tf32"),
        "of products on a GPU's tensor cores: as good as float32, or faster with 10 bits",
        resume="fixed",
    )
    threads: int = option(
        0,
        at_least(0),
        "threads of a rank, on which nothing depends but time; 0: the cores it may use, divided "
        "among the ranks that may use them",
    )
    worker_load: str | None = option(
        None,
        Rule(
            str,
            "measured, or a number a rank such as 1,1,0,1",
            choices=("measured",),
            pattern=r"[0-9]+(\.[0-9]{1,3})?(,[0-9]+(\.[0-9]{1,3})?)*",
            joint=",",
            optional=True,
        ),
        "how much of a mini-batch each rank takes, 0: nothing; measured: by the time that its "
        "images took it in the epoch before. Nothing depends on it but time; none: equal shares",
        matlab="WorkerLoad",
    )
    winograd: str = option(
        "auto",
        one_of("auto", "off", "fast"),
        "3x3 convolutions on CPUs: by Winograd's algorithm where its rounding does no harm, never, "
        "or wherever it is fast",
        resume="fixed",
    )
    checkpoint_every: int = option(
        0,
        at_least(0),
        "iterations between checkpoints, beside those at the ends of epochs",
        matlab="CheckpointFrequency",
    )
    timeout: float = option(300.0, positive(), "seconds to wait for a rank that does not answer")
    verbose: str = option(
        "on",
        one_of(*ON_OFF),
        "show how training goes on: a bar on a terminal, lines elsewhere",
        matlab="Verbose",
    )
    verbose_every: int = option(
        50,
        at_least(0),
        "iterations between lines in a log, of which there is one in 10 s at most; 0: none of "
        "iterations, but the last where that does not end an epoch",
        matlab="VerboseFrequency",
    )
    plots: str = option(
        "training-progress",
        one_of("training-progress", "none"),
        "draw progress.png in the folder of results, where matplotlib is: at the ends of epochs, "
        "every 10 s at most, and of the run",
        matlab="Plots",
    )
    # in the library only
    augmenter: Any = None  # an Augmenter, in place of flip, translate, ... random_crop
    validation: Any = None  # a datastore; the command has --validation-data
    output_functions: tuple = ()  # each called as f(info) on all ranks, see `progress.Progress`

    def __new__(cls, **keywords):
        for name in keywords:
            if name not in cls.__dataclass_fields__:
                hint = OF_OTHERS.get(name) or nearest(name, cls.__dataclass_fields__)
                raise UserError(f"unknown option {name}{hint}")
        return super().__new__(cls)

    def __post_init__(self):
        for name in NAMES:
            value = check(name, getattr(self, name))
            if value is None and name in BY_SOLVER:
                value = BY_SOLVER[name].get(self.solver)
            object.__setattr__(self, name, value)
        functions = self.output_functions
        functions = (functions,) if callable(functions) else tuple(functions)
        if not all(map(callable, functions)):
            raise UserError(f"output_functions must be functions, found {functions}")
        object.__setattr__(self, "output_functions", functions)
        if self.warmup_iterations and self.warmup_epochs:
            raise UserError(
                f"--warmup-iterations {self.warmup_iterations} and --warmup-epochs "
                f"{self.warmup_epochs}: expected one of them"
            )
        if callable(self.learn_rate_schedule) and (self.warmup_iterations or self.warmup_epochs):
            raise UserError(
                "learn_rate_schedule: a function gives the rate of every iteration, so there is no "
                "warm-up beside it"
            )
        if self.sampling == "partition" and self.worker_load == "measured":
            raise UserError(
                "--sampling partition and --worker-load measured: what a rank's part of the images "
                "is would depend on time; give numbers"
            )

    @classmethod
    def from_recipe(cls, name, **explicit):
        """The options of the recipe `name` ("digits"), overridden by the explicit ones."""
        if name not in RECIPES:
            raise UserError(f"no recipe {name}: expected one of {', '.join(RECIPES)}")
        return cls(**{**recipe(name, explicit), **explicit})

    def for_ranks(self, ranks):
        """These options, with the batch size that batch_per_rank means for so many ranks."""
        if self.batch_per_rank is None:
            return self
        return replace(self, batch_size=self.batch_per_rank * ranks)

    def load(self, ranks):
        """The weights by which `ranks` ranks share a mini-batch at first, or None: equal shares.

        Raises UserError where worker_load is not one of so many numbers, or all of them are 0.
        """
        if self.worker_load in (None, "measured"):
            return None
        found = tuple(round(1000 * float(text)) for text in self.worker_load.split(","))
        if len(found) != ranks:
            raise UserError(
                f"--worker-load {self.worker_load}: expected a number for each of {ranks} rank(s), "
                f"found {len(found)}"
            )
        if not any(found):
            raise UserError(f"--worker-load {self.worker_load}: expected a rank that works")
        return found

    def as_dict(self):
        """{name: value} of what is a number, a text or None; a function as its name."""
        known = {name: getattr(self, name) for name in NAMES}
        return {
            name: f"function {value.__qualname__}" if callable(value) else value
            for name, value in known.items()
        }


# What a run is about beside its options: known on the command line and in a file's [run] table.
RUN: dict[str, Any] = {
    "network": "digits",
    "data": "digits",
    "test_data": None,
    "test_fraction": 0.1,
    "validation_data": None,  # `validation` in Python
    "colour": None,
    "resize": None,
    "cover": None,
    "centre_crop": None,
}
OF_OTHERS = {
    **dict.fromkeys(("world", "out", "console", "resume"), ": it is an argument of dl.train"),
    **dict.fromkeys(RUN.keys() - {"validation_data"}, ": it is an option of the command alone"),
}
OPTIONS = {f.name: f for f in fields(TrainingOptions) if f.metadata}
NAMES = tuple(OPTIONS)
OF_SOLVER = (*BY_SOLVER, "momentum", "gradient_decay_factor", "epsilon")


def recipe(name, given):
    """The options of a recipe, but for those that mean something else beside what was given.

    A recipe's rate and the like are those of its solver, and its reference batch size is that of
    its rate. given: {name: value} of what comes before the recipe.
    """
    known = dict(RECIPES.get(name, {}))
    if given.get("solver", known.get("solver", "sgdm")) != known.get("solver", "sgdm"):
        known = {key: value for key, value in known.items() if key not in OF_SOLVER}
    if "learning_rate" not in known or given.get("learning_rate") is not None:
        known.pop("scale_rate", None)
    return known


def flag(name):
    """An option's name as typed: batch_size is --batch-size."""
    return "--" + name.replace("_", "-")


def check(name, value, spelled=None, text=False):
    """The value of this option in its proper type.

    `spelled`: the option as the user wrote it, for the error. `text`: the value comes from a text,
    such as a command line, so that "12" is a number. Raises UserError.
    """
    return checked(OPTIONS[name].metadata["rule"], value, spelled or name, text)
