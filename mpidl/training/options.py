"""The options of a training run: one definition for the library, the command line and TOML files.

Each field of `TrainingOptions` carries its help text and the values it takes (`rules`). Where a
run's values come from: see `configuration`. The defaults are those of MATLAB's trainingOptions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mpidl.data.normalize import NAMES as NORMALIZATIONS
from mpidl.errors import UserError
from mpidl.nn.zoo import RECIPES
from mpidl.training.rules import (
    Rule,
    at_least,
    checked,
    nearest,
    numbers,
    one_of,
    positive,
    share,
)

# What depends on the solver where it is not given.
BY_SOLVER: dict[str, dict[str, float]] = {
    "learning_rate": {"sgdm": 0.01, "adam": 0.001, "rmsprop": 0.001},
    "squared_gradient_decay_factor": {"sgdm": 0.999, "adam": 0.999, "rmsprop": 0.9},
}


def option(default, rule, text, *, resume="free", matlab=""):
    """A field of TrainingOptions. `resume`: "free" to change, "fixed", or may only go "up";
    matlab: what MATLAB calls it."""
    facts = {"rule": rule, "help": text, "resume": resume, "matlab": matlab}
    return field(default=default, metadata=facts)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train. Raises UserError for an unknown name or a value that cannot be used."""

    epochs: int = option(
        30, at_least(1), "passes over the training set", resume="up", matlab="MaxEpochs"
    )
    max_iterations: int | None = option(
        None,
        at_least(1, optional=True),
        "stop after this many mini-batches in all, resumed runs included",
    )
    batch_size: int = option(
        128,
        at_least(1),
        "images in a mini-batch, over all ranks",
        resume="fixed",
        matlab="MiniBatchSize",
    )
    batch_per_rank: int | None = option(
        None,
        at_least(1, optional=True),
        "images of a mini-batch for each rank: a batch size of this times the ranks, so that the "
        "weights depend on their number",
        matlab="miniBatchSize*N",
    )
    solver: str = option(
        "sgdm",
        one_of("sgdm", "adam", "rmsprop"),
        "the optimizer: SGD with momentum, Adam or RMSProp",
        resume="fixed",
        matlab="solverName",
    )
    learning_rate: float = option(
        None,
        positive(optional=True),
        "step of the optimizer at the start; none: 0.01 with sgdm, 0.001 with adam and rmsprop",
        resume="fixed",
        matlab="InitialLearnRate",
    )
    momentum: float = option(
        0.9,
        share(),
        "sgdm: share of the last step that is kept",
        resume="fixed",
        matlab="Momentum",
    )
    gradient_decay_factor: float = option(
        0.9,
        share(),
        "adam: decay of the moving mean of the gradient",
        resume="fixed",
        matlab="GradientDecayFactor",
    )
    squared_gradient_decay_factor: float = option(
        None,
        share(optional=True),
        "adam, rmsprop: decay of the moving mean of its square; none: 0.999 with adam, 0.9 with "
        "rmsprop",
        resume="fixed",
        matlab="SquaredGradientDecayFactor",
    )
    epsilon: float = option(
        1e-8,
        positive(),
        "adam, rmsprop: added to the root that a step is divided by",
        resume="fixed",
        matlab="Epsilon",
    )
    scale_rate: int | None = option(
        None,
        at_least(1, optional=True),
        "the batch size that the learning rate is for: others have it times batch size / this",
        resume="fixed",
        matlab="0.1*miniBatchSize/256",
    )
    learn_rate_schedule: str | Callable = option(
        "none",
        one_of("none", "piecewise", "cosine", "polynomial", function=True),
        "how the learning rate falls: not at all, in drops, or with every iteration to the end of "
        "the last epoch; in Python also a function of epoch and iteration, both from 1",
        resume="fixed",
        matlab="LearnRateSchedule",
    )
    learn_rate_drop_factor: float = option(
        0.1,
        Rule(float, "above 0 and at most 1", 0, 1, above=True),
        "piecewise: the rate times this at each drop",
        resume="fixed",
        matlab="LearnRateDropFactor",
    )
    learn_rate_drop_period: int = option(
        10, at_least(1), "piecewise: epochs to a drop", resume="fixed", matlab="LearnRateDropPeriod"
    )
    learn_rate_power: float = option(
        1.0,
        positive(),
        "polynomial: the power of the share of iterations that is left",
        resume="fixed",
        matlab="polynomialLearnRate(Power)",
    )
    learn_rate_final_factor: float = option(
        0.0,
        share(),
        "cosine, polynomial: the share of the rate that is left at the end",
        resume="fixed",
        matlab="FinalFactor",
    )
    warmup_iterations: int = option(
        0,
        at_least(0),
        "iterations in which the rate rises to what the schedule begins with",
        resume="fixed",
        matlab='"warmup"',
    )
    warmup_epochs: int = option(
        0,
        at_least(0),
        "the same in epochs",
        resume="fixed",
        matlab='warmupLearnRate(FrequencyUnit="epoch")',
    )
    warmup_factor: float = option(
        0.1,
        Rule(float, "above 0 and at most 1", 0, 1, above=True),
        "the share of the rate that a warm-up begins with",
        resume="fixed",
        matlab="warmupLearnRate(InitialFactor)",
    )
    l2: float = option(
        1e-4,
        Rule(float, "at least 0", 0),
        "L2 regularization, of weights alone",
        resume="fixed",
        matlab="L2Regularization",
    )
    gradient_threshold: float = option(
        math.inf,
        positive(infinite=True),
        "gradients larger than this are made as small, L2 regularization included; inf: none is",
        resume="fixed",
        matlab="GradientThreshold",
    )
    gradient_threshold_method: str = option(
        "l2norm",
        one_of("l2norm", "global-l2norm", "absolute-value"),
        "what the threshold is for: the norm of each learnable's gradient, that of all of them "
        "together, or each number by itself",
        resume="fixed",
        matlab="GradientThresholdMethod",
    )
    shuffle: str = option(
        "once",
        one_of("never", "once", "every-epoch"),
        "order of the training set",
        resume="fixed",
        matlab="Shuffle",
    )
    sampling: str = option(
        "global",
        one_of("global", "partition"),
        "partition: each rank has a part of the training set to itself and orders that, so that "
        "the weights depend on the number of ranks",
        resume="fixed",
        matlab="partition",
    )
    seed: int = option(
        0,
        Rule(int, "between 0 and 2**63 - 1", 0, 2**63 - 1),
        "of all random numbers: weights, split and order",
        resume="fixed",
    )
    normalization: str = option(
        "rescale-zero-one",
        one_of(*NORMALIZATIONS),
        "what pixels become: as they are, divided by 255, from -1 to 1, less the mean of each "
        "channel, less the mean image, or less the mean and divided by the standard deviation of "
        "each channel, over the training set",
        resume="fixed",
        matlab="imageInputLayer(Normalization)",
    )
    flip: str = option(
        "none",
        one_of("none", "x", "y", "xy"),
        "mirror half of the training images left to right, top to bottom, or each for half of them",
        resume="fixed",
        matlab="RandXReflection, RandYReflection",
    )
    translate: int = option(
        0,
        at_least(0),
        "move training images by up to so many pixels each way",
        resume="fixed",
        matlab="RandXTranslation, RandYTranslation",
    )
    rotation: float = option(
        0.0,
        Rule(float, "between 0 and 180", 0, 180),
        "turn training images by up to so many degrees each way",
        resume="fixed",
        matlab="RandRotation",
    )
    scale: str | None = option(
        None,
        Rule(
            str,
            "a range of factors such as 0.9,1.1",
            pattern=r"[0-9]{1,3}(\.[0-9]{1,6})?,[0-9]{1,3}(\.[0-9]{1,6})?",
            optional=True,
        ),
        "scale training images by a factor of this range",
        resume="fixed",
        matlab="RandScale",
    )
    shear: float = option(
        0.0,
        Rule(float, "at least 0 and below 45", 0, 45, below=True),
        "shear training images by up to so many degrees, along x and along y",
        resume="fixed",
        matlab="RandXShear, RandYShear",
    )
    fill: int = option(
        0,
        Rule(int, "between 0 and 255", 0, 255),
        "the pixels beyond the edges of an image that was moved",
        resume="fixed",
        matlab="FillValue",
    )
    random_crop: str | None = option(
        None,
        Rule(
            str,
            "a size such as 227x227",
            pattern=r"[1-9][0-9]{0,5}x[1-9][0-9]{0,5}",
            optional=True,
        ),
        "train on windows of this HEIGHTxWIDTH at random places; others are cut in the centre",
        resume="fixed",
        matlab='OutputSizeMode="randcrop"',
    )
    workers: int = option(
        1,
        at_least(1),
        "threads of a rank that read, decode and augment images ahead, on which nothing depends "
        "but time",
        matlab="DispatchInBackground, PreprocessingEnvironment",
    )
    prefetch: int = option(
        2,
        at_least(0),
        "mini-batches that they make ahead of their use; 0: made when they are needed",
        matlab="DispatchInBackground",
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
        numbers("numbers of GPUs such as 0,2"),
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
    verbose_every: int = option(
        50,
        at_least(0),
        "iterations between lines in a log; 0: a line an epoch only",
        matlab="VerboseFrequency",
    )
    # in the library only
    augmenter: Any = None  # an Augmenter, in place of flip, translate, ... random_crop
    validation: Any = None  # a datastore; the command has --validation-data
    output_functions: tuple = ()  # each called as f(info) on all ranks, see `progress.Progress`

    def __new__(cls, **keywords):
        for name in keywords:
            if name not in cls.__dataclass_fields__:
                raise UserError(f"unknown option {name}{nearest(name, cls.__dataclass_fields__)}")
        return super().__new__(cls)

    def __post_init__(self):
        for name in NAMES:
            value = check(name, getattr(self, name))
            if value is None and name in BY_SOLVER:
                value = BY_SOLVER[name][self.solver]
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
