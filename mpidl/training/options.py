"""The options of a training run: one definition for the library, the command line and TOML files.

Each field of `TrainingOptions` carries its help text and the values it takes. Where a run's values
come from, the first that has one: the command line, --config FILE.toml, the run that is resumed,
the network's recipe, the defaults (those of MATLAB's trainingOptions).
"""

import difflib
import json
import math
import operator
import platform
import re
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from typing import Any, NamedTuple

from mpidl.data.datastore import shown
from mpidl.errors import UserError
from mpidl.nn.zoo import RECIPES
from mpidl.training.modelfile import write_whole

# What a run is about beside its options: known on the command line and in a file's [run] table.
RUN = {"network": "digits", "data": "digits", "test_data": None}


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
    optional: bool = False  # None will do; files and the command line write "none"


def at_least(low, *, optional=False):
    return Rule(int, f"at least {low}", low, optional=optional)


def numbers(words):
    return Rule(str, words, pattern=r"[0-9]+(,[0-9]+)*", optional=True)


def positive():
    return Rule(float, "positive", 0, above=True)


def one_of(*choices):
    words = ", ".join(choices[:-1]) + f" or {choices[-1]}"
    return Rule(str, words, choices=choices)


def option(default, rule, text, *, resume="free"):
    """A field of TrainingOptions. `resume`: "free" to change, "fixed", or may only go "up"."""
    return field(default=default, metadata={"rule": rule, "help": text, "resume": resume})


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train. Raises UserError for an unknown name or a value that cannot be used."""

    epochs: int = option(30, at_least(1), "passes over the training set", resume="up")
    max_iterations: int | None = option(
        None,
        at_least(1, optional=True),
        "stop after this many mini-batches in all, resumed runs included",
    )
    batch_size: int = option(
        128, at_least(1), "images in a mini-batch, over all ranks", resume="fixed"
    )
    batch_per_rank: int | None = option(
        None,
        at_least(1, optional=True),
        "images of a mini-batch for each rank: a batch size of this times the ranks, so that the "
        "weights depend on their number",
    )
    learning_rate: float = option(0.01, positive(), "step of SGD with momentum", resume="fixed")
    momentum: float = option(
        0.9,
        Rule(float, "at least 0 and below 1", 0, 1, below=True),
        "share of the last step that is kept",
        resume="fixed",
    )
    l2: float = option(
        1e-4, Rule(float, "at least 0", 0), "L2 regularization, of weights alone", resume="fixed"
    )
    shuffle: str = option(
        "once", one_of("never", "once", "every-epoch"), "order of the training set", resume="fixed"
    )
    seed: int = option(
        0,
        Rule(int, "between 0 and 2**63 - 1", 0, 2**63 - 1),
        "of all random numbers: weights, split and order",
        resume="fixed",
    )
    device: str = option(
        "auto",
        one_of("auto", "cpu", "gpu"),
        "where the ranks compute; auto: on GPUs where every rank has one, else on CPUs",
    )
    gpus: str | None = option(
        None,
        numbers("numbers of GPUs such as 0,2"),
        "the GPUs of each host that may be used, by their numbers among those that are visible, in "
        "the order in which its ranks take them; none: all",
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
    winograd: str = option(
        "auto",
        one_of("auto", "off", "fast"),
        "3x3 convolutions on CPUs: by Winograd's algorithm where its rounding does no harm, never, "
        "or wherever it is fast",
        resume="fixed",
    )
    batchnorm: str = option(
        "global",
        one_of("global", "local"),
        "statistics of the whole mini-batch, or of each rank's share of it, which makes the "
        "weights depend on the number of ranks",
        resume="fixed",
    )
    checkpoint_every: int = option(
        0, at_least(0), "iterations between checkpoints, beside those at the ends of epochs"
    )
    timeout: float = option(300.0, positive(), "seconds to wait for a rank that does not answer")
    verbose_every: int = option(
        50, at_least(0), "iterations between lines in a log; 0: a line an epoch only"
    )
    validation: Any = None  # a datastore, evaluated after each epoch; in the library only

    def __new__(cls, **keywords):
        for name in keywords:
            if name not in cls.__dataclass_fields__:
                raise UserError(f"unknown option {name}{nearest(name, cls.__dataclass_fields__)}")
        return super().__new__(cls)

    def __post_init__(self):
        for name in NAMES:
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @classmethod
    def from_recipe(cls, name, **explicit):
        """The options of the recipe `name` ("digits"), overridden by the explicit ones."""
        if name not in RECIPES:
            raise UserError(f"no recipe {name}: expected one of {', '.join(RECIPES)}")
        return cls(**{**RECIPES[name], **explicit})

    def for_ranks(self, ranks):
        """These options, with the batch size that batch_per_rank means for so many ranks."""
        if self.batch_per_rank is None:
            return self
        return replace(self, batch_size=self.batch_per_rank * ranks)

    def as_dict(self):
        """{name: value} of all but `validation`; values are numbers, texts or None."""
        return {name: getattr(self, name) for name in NAMES}


OPTIONS = {f.name: f for f in fields(TrainingOptions) if f.metadata}
NAMES = tuple(OPTIONS)


def flag(name):
    """An option's name as typed: batch_size is --batch-size."""
    return "--" + name.replace("_", "-")


def nearest(name, known):
    """': did you mean ...?' where a known name is near, else ''."""
    found = [other for other in known if other.startswith(name)]
    found = found or difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f": did you mean {found[0]}?" if found else ""


def check(name, value, spelled=None, text=False):
    """The value of this option in its proper type.

    `spelled`: the option as the user wrote it, for the error. `text`: the value comes from a text,
    such as a command line, so that "12" is a number. Raises UserError.
    """
    rule = OPTIONS[name].metadata["rule"]
    if rule.optional and (value is None or value == "none"):
        return None
    number = _convert(rule.kind, value, text)
    if (
        number is None
        or (rule.choices and number not in rule.choices)
        or (rule.pattern and not re.fullmatch(rule.pattern, number))
        or (rule.kind is not str and not _within(rule, number))
    ):
        kind = {int: "a whole number, ", float: "a number, ", str: ""}[rule.kind]
        kind = kind if number is None else ""
        raise UserError(f"{spelled or name} must be {kind}{rule.words}, found {value}")
    return number


def _convert(kind, value, text):
    """The value as an int, float or str; None where it is none."""
    if kind is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or (isinstance(value, str) and not text):
        return None
    try:
        if kind is int:
            return int(value) if isinstance(value, str) else operator.index(value)
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _within(rule, number):
    low = number > rule.low if rule.above else number >= rule.low
    high = number < rule.high if rule.below else number <= rule.high
    return math.isfinite(number) and low and high


class Resolved(NamedTuple):
    """A run's options, what it is about ({network, data, test_data}), and each value's source."""

    options: TrainingOptions
    run: dict
    sources: dict


def resolve(given, *, config=None, resumed=None):
    """Put together the options of a run.

    given: {name: value} from the command line; names that are neither options nor in RUN are
    passed over. config: path of a TOML file. resumed: {"options": {...}, "run": {...}} as the
    checkpoint kept them. Returns Resolved. Raises UserError.
    """
    layers = [("command line", {n: v for n, v in given.items() if n in OPTIONS or n in RUN})]
    if config is not None:
        layers.append((f"config {config}", read_config(config)))
    if resumed is not None:
        # (a checkpoint of dl.train says nothing of what the command calls network and data)
        layers.append(("resumed run", {**resumed["options"], **resumed.get("run", {})}))
    network = next((known["network"] for _, known in layers if "network" in known), RUN["network"])
    layers.append((f"recipe {network}", RECIPES.get(network, {})))
    layers.append(("default", {**TrainingOptions().as_dict(), **RUN}))

    values, sources = {}, {}
    for name in (*NAMES, *RUN):
        sources[name], known = next((s, known) for s, known in layers if name in known)
        values[name] = known[name]
        if name in OPTIONS:
            spelled = flag(name) if sources[name] == "command line" else name
            if sources[name].startswith("config "):
                spelled = f"{config}: {name}"
            values[name] = check(name, values[name], spelled)
    _one_batch_size(values, sources, [source for source, _ in layers])
    run = {name: values.pop(name) for name in RUN}
    return Resolved(TrainingOptions(**values), run, sources)


def _one_batch_size(values, sources, order):
    """Refuse a batch size that the user gave with, or above, that of each rank."""
    size, per_rank = sources["batch_size"], sources["batch_per_rank"]
    typed = size == "command line" or size.startswith("config ")
    if (
        typed
        and values["batch_per_rank"] is not None
        and order.index(size) <= order.index(per_rank)
    ):
        raise UserError(
            f"--batch-size {values['batch_size']} ({size}) and --batch-per-rank "
            f"{values['batch_per_rank']} ({per_rank}): expected one of them"
        )


def read_config(path):
    """{name: value} of a TOML file: options at the top or in [options], and those of [run].

    An options.toml that a run left is such a file; its [sources] and [versions] are passed over.
    Raises UserError.
    """
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"--config {path}: not a TOML file: {error}") from error

    table = {name: value for name, value in table.items() if name not in ("sources", "versions")}
    for group in ("options", "run"):
        inner = table.pop(group, {})
        if not isinstance(inner, dict):
            raise UserError(f"{path}: [{group}] must be a table, found {inner}")
        table.update(inner)
    values = {}
    for name, value in table.items():
        known = name.replace("-", "_")
        if known in OPTIONS:
            values[known] = check(known, value, f"{path}: {name}")
        elif known in RUN:
            if not isinstance(value, str):
                raise UserError(f"{path}: {name} must be a text, found {value}")
            values[known] = None if value == "none" else value
        else:
            raise UserError(f"{path}: unknown option {name}{nearest(known, [*OPTIONS, *RUN])}")
    return values


def write_options(path, resolved, versions):
    """Write options.toml: [options], [run], where each value came from, and what ran.

    `versions`: {"python": "3.11.7", ...}, see `versions_of`. None is written as "none".
    """
    import tomli_w

    def plain(table):
        table = {name: "none" if value is None else value for name, value in table.items()}
        return {name: shown(v) if isinstance(v, str) else v for name, v in table.items()}

    known = resolved.options.as_dict()
    if known["batch_per_rank"] is not None:  # which the batch size follows from
        del known["batch_size"]
    tables = {
        "options": plain(known),
        "run": plain(resolved.run),
        "sources": plain(resolved.sources),
        "versions": plain(versions),
    }
    write_whole(path, tomli_w.dumps(tables).encode())


def versions_of(mpi_library):
    """The versions that options.toml records; `mpi_library`: MPI's own text about itself."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "mpidl", "mpi4py"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed as a package"
    first_line = (mpi_library.strip().splitlines() or ["unknown"])[0]
    return {**versions, "mpi": " ".join(first_line.replace("\0", "").split())}


def changed_on_resume(saved, now, where="the resumed run"):
    """Refuse what a resumed run may not change, by name.

    saved, now: {"options": {...}, "network": ..., "fingerprint": ...}: the options, the network's
    list of layers and the fingerprint of the data, as in the checkpoint and as of now. Ranks are in
    neither: they may change. Raises UserError.
    """
    refused = []
    for name, known in OPTIONS.items():
        rule, old, new = known.metadata["resume"], saved["options"].get(name), now["options"][name]
        if name not in saved["options"] or old == new:
            continue
        if rule == "fixed":
            per_rank = name == "batch_size" and now["options"]["batch_per_rank"]
            refused.append(
                f"{flag(name)} was {old}, is {new}"
                + (f" (--batch-per-rank {per_rank}; none keeps it)" if per_rank else "")
            )
        elif rule == "up" and new < old:
            refused.append(f"{flag(name)} was {old}, is {new} (it may only grow)")
    network = json.loads(json.dumps(now["network"]))  # lists for tuples, as in the checkpoint
    if saved["network"] != network:
        refused.append(f"--network: {_difference(saved['network'], network)}")
    if saved["fingerprint"] != now["fingerprint"]:
        refused.append(
            f"--data: the images are not those of the run (fingerprint was "
            f"{saved['fingerprint'][:12]}, is {now['fingerprint'][:12]})"
        )
    if refused:
        raise UserError(f"--resume: {where} cannot go on: {'; '.join(refused)}")


def _difference(saved, now):
    """In words, where two lists of layers part."""
    for old, new in zip(saved, now, strict=False):
        if old != new:
            name = new.get("name", "?")
            changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            return f"layer {name} differs in {', '.join(changed)}"
    return f"{len(saved)} layers were trained, {len(now)} are given"
