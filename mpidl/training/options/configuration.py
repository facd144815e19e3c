"""Merge the sources of a run's options, record the result and check changes on resume.

The sources are, from highest to lowest precedence: the command line, --config FILE.toml, the
resumed run, the network's recipe, and the defaults. The defaults are the same as in MATLAB's
trainingOptions.
"""

import json
import os
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mpidl.data.datastore import Datastore
from mpidl.errors import UserError
from mpidl.files import read_toml, write_whole
from mpidl.text import printable
from mpidl.training.options.option_types import (
    SIZE,
    Rule,
    at_least,
    check_value,
    fraction,
    nearest,
    one_of,
    positive,
    rule_of,
)
from mpidl.training.options.training_options import (
    NAMES,
    OPTIONS,
    RUN,
    TrainingOptions,
    flag,
    recipe_options,
)
from mpidl.training.schedules import ENDING

if TYPE_CHECKING:
    from mpidl.nn import Network

WEIGHTS = "weights"  # source of a normalization that is stored in the weight file
RECORDS = ("sources", "versions", "weights_file")  # tables of options.toml that contain no options
TEXT = Rule(str, "a text", pattern="(?s).*")
RULES: dict[str, Rule] = {
    **{name: rule_of(declared) for name, declared in OPTIONS.items()},
    **{name: TEXT._replace(optional=default is None) for name, default in RUN.items()},
    "network": TEXT._replace(optional=True),
    "new_layer_factor": positive(),
    "test_fraction": fraction(),
    "colour": one_of("gray", "rgb", optional=True),
    "requests": at_least(1),
    "retry_seconds": positive(),
    **dict.fromkeys(("resize", "cover", "centre_crop"), SIZE),
}


class Resolved(NamedTuple):
    """The options and inputs of a run, with the source of each value.

    Attributes
    ----------
    options : TrainingOptions
        The options.
    run : dict
        The inputs of the run: {name: value} with the names in `RUN`.
    sources : dict
        {name: source} for each option and input, such as {"epochs": "command line"}.
    """

    options: TrainingOptions
    run: dict[str, Any]
    sources: dict[str, str]


def resolve(
    typed: Mapping[str, Any],
    *,
    config: str | os.PathLike[str] | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merge the sources of a run's options.

    Parameters
    ----------
    typed : mapping
        {name: value} from the command line. Names that are neither options nor in `RUN` are
        ignored.
    config : path, optional
        A TOML file with options, as given by --config.
    resumed : mapping, optional
        {"options": {...}, "run": {...}} from the checkpoint of the resumed run.

    Returns
    -------
    Resolved
        The merged options and inputs, with the source of each value.

    Raises
    ------
    UserError
        If the file cannot be read or is not valid TOML, or if a name or a value is invalid.
    """
    layers = [("command line", {n: v for n, v in typed.items() if n in OPTIONS or n in RUN})]
    if config is not None:
        layers.append((f"config {config}", read_config(config)))
    if resumed is not None:
        # Checkpoints of the command `train` contain "run"; checkpoints of `dl.train` do not.
        layers.append(("resumed run", {**resumed["options"], **resumed.get("run", {})}))
    merged = {name: value for _, table in reversed(layers) for name, value in table.items()}
    usual = RUN["network"] if merged.get("weights") in (None, "none") else None
    network = merged.get("network", usual)
    layers.append((f"recipe {network}", recipe_options(network, merged)))
    defaults = {**{name: f.default for name, f in OPTIONS.items()}, **RUN, "network": usual}
    layers.append(("default", defaults))

    values, sources = {}, {}
    for name in (*NAMES, *RUN):
        source, table = next((source, table) for source, table in layers if name in table)
        spelled = flag(name) if source == "command line" else name
        if source.startswith("config "):
            spelled = f"{config}: {name}"
        values[name], sources[name] = table[name], source
        if source != "default":  # a default may be None, which the solver later replaces
            values[name] = check_value(RULES[name], table[name], spelled)
    _refuse_two_batch_sizes(values, sources, [source for source, _ in layers])
    run = {name: values.pop(name) for name in RUN}
    return Resolved(TrainingOptions(**values), run, sources)


def _refuse_two_batch_sizes(values, sources, order):
    """Raise UserError if a batch size per rank would silently override the user's batch size.

    This would happen if the user set the batch size on the command line or in a config file, and
    the batch size per rank came from a source with the same or lower precedence.
    """
    size, per_rank = sources["batch_size"], sources["batch_per_rank"]
    by_user = size == "command line" or size.startswith("config ")
    if (
        by_user
        and values["batch_per_rank"] is not None
        and order.index(size) <= order.index(per_rank)
    ):
        raise UserError(
            f"--batch-size {values['batch_size']} ({size}) and --batch-per-rank "
            f"{values['batch_per_rank']} ({per_rank}): expected at most one of them"
        )


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read options and inputs of a run from a TOML file.

    Options are at the top level or in the table [options]; inputs are in the table [run]. The file
    may be the options.toml of an earlier run. The tables [sources], [versions] and [weights_file]
    are ignored.

    Parameters
    ----------
    path : path
        The file.

    Returns
    -------
    dict
        {name: value}, with underscores in the names.

    Raises
    ------
    UserError
        If the file cannot be read or is not valid TOML, or if a name or a value is invalid.
    """
    table = read_toml(path, f"--config {path}")
    table = {name: value for name, value in table.items() if name not in RECORDS}
    for group in ("options", "run"):
        inner = table.pop(group, {})
        if not isinstance(inner, dict):
            raise UserError(f"{path}: [{group}] must be a table, found {inner}")
        table.update(inner)
    values = {}
    for name, value in table.items():
        option = name.replace("-", "_")
        if isinstance(value, dict):
            raise UserError(f"{path}: unknown table [{name}]: expected [options] or [run]")
        if option not in RULES:
            raise UserError(f"{path}: unknown option {name}{nearest(option, RULES)}")
        values[option] = check_value(RULES[option], value, f"{path}: {name}")
    return values


def write_options(
    path: str | os.PathLike[str],
    resolved: Resolved,
    versions: Mapping[str, str],
    weights_file: Mapping[str, str] | None = None,
) -> None:
    """Write the options and inputs of a run, their sources and software versions to a TOML file.

    None is written as "none". The file omits options whose values follow from other options or from
    the weight file.

    Parameters
    ----------
    path : path
        The file to write.
    resolved : Resolved
        The options and inputs.
    versions : mapping
        Software versions, {"python": "3.11.7", ...}, as returned by `versions_of`.
    weights_file : mapping, optional
        Path and SHA-256 of the weight file. By default, no weight file is recorded.
    """
    import tomli_w

    def plain(table):
        table = {name: "none" if value is None else value for name, value in table.items()}
        return {name: printable(v) if isinstance(v, str) else v for name, v in table.items()}

    options = resolved.options.as_dict()
    if options["batch_per_rank"] is not None:  # the batch size follows from this option
        del options["batch_size"]
    if resolved.sources["normalization"] == WEIGHTS:
        del options["normalization"]
    tables = {
        "options": plain(options),
        "run": plain(resolved.run),
        "sources": plain(resolved.sources),
        "versions": plain(versions),
        **({"weights_file": plain(weights_file)} if weights_file else {}),
    }
    write_whole(path, tomli_w.dumps(tables).encode())


def version_of(package: str) -> str:
    """Return the installed version of a package, or "not installed as a package"."""
    from importlib import metadata  # only rank 0 needs this module, and the import takes 20 ms

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def versions_of(mpi_library: str) -> dict[str, str]:
    """Return the versions that options.toml records: Python, NumPy, mpidl, mpi4py and MPI.

    Parameters
    ----------
    mpi_library : str
        The version string of the MPI library. Only its first line is recorded.
    """
    versions = {"python": platform.python_version()}
    for package in ("numpy", "mpidl", "mpi4py"):
        versions[package] = version_of(package)
    first_line = (mpi_library.strip().splitlines() or ["unknown"])[0]
    return {**versions, "mpi": " ".join(first_line.replace("\0", "").split())}


def resumable(
    options: TrainingOptions, net: "Network", datastore: Datastore, ranks: int
) -> dict[str, Any]:
    """Return the facts of a run that `changed_on_resume` compares with a checkpoint."""
    store = options.validation
    return {
        "options": options.as_dict(),
        "network": net.spec(),
        "fingerprint": datastore.fingerprint(),
        "validation": {"fingerprint": None if store is None else store.fingerprint()},
        "shares": shares(options, ranks),
    }


def shares(options: TrainingOptions, ranks: int) -> dict[str, Any]:
    """Return {"ranks": ..., "load": ...}, which determine the share of the data for each rank."""
    load = options.load(ranks)
    return {"ranks": ranks, "load": None if load is None else list(load)}


def changed_on_resume(
    saved: Mapping[str, Any], now: Mapping[str, Any], run_name: str = "the resumed run"
) -> None:
    """Raise UserError if a run has changed since its checkpoint in a way that prevents resuming.

    The number of ranks may change, except in the middle of an epoch with --sampling partition.

    Parameters
    ----------
    saved : mapping
        The facts in the checkpoint.
    now : mapping
        The facts of the resumed run, as returned by `resumable`.
    run_name : str
        Name of the run in the error message.

    Raises
    ------
    UserError
        If a change is not allowed. The message lists all such changes.
    """
    refused = []
    # Options that did not exist when the checkpoint was written had their default values.
    defaults = TrainingOptions(solver=saved["options"].get("solver", "sgdm")).as_dict()
    saved_options = defaults | saved["options"]
    for name, declared in OPTIONS.items():
        rule = declared.metadata["resume"]
        old, new = saved_options[name], now["options"][name]
        if old == new:
            continue
        if rule == "fixed":
            per_rank = name == "batch_size" and now["options"]["batch_per_rank"]
            refused.append(
                f"{flag(name)} was {old}, is {new}"
                + (f" (--batch-per-rank {per_rank}; none keeps it)" if per_rank else "")
            )
        elif rule == "up" and new < old:
            refused.append(f"{flag(name)} was {old}, is {new} (it may only increase)")
    schedule = now["options"].get("learn_rate_schedule")
    old, new = (table["options"].get("epochs") for table in (saved, now))
    if schedule in ENDING and new > old:
        refused.append(
            f"--epochs was {old}, is {new}; it cannot increase with --learn-rate-schedule "
            f"{schedule}, which ends with the last epoch"
        )
    is_swa = now["options"].get("average") == "swa"
    if is_swa and now["options"]["average_start"] is None and new > old:
        refused.append(
            f"--epochs was {old}, is {new}; it cannot increase with --average swa without "
            "--average-start: the average starts after three quarters of the epochs"
        )
    network = json.loads(json.dumps(now["network"]))  # tuples become lists, as in the checkpoint
    if saved["network"] != network:
        refused.append(f"--network: {_difference(saved['network'], network)}")
    if saved["fingerprint"] != now["fingerprint"]:
        refused.append(
            f"--data: the images are not those of the run (fingerprint was "
            f"{saved['fingerprint'][:12]}, is {now['fingerprint'][:12]})"
        )
    old = saved.get("validation", {}).get("fingerprint")
    new = now.get("validation", {}).get("fingerprint")
    if old not in (None, new):
        refused.append(
            f"--validation-data: the images are not those of the run (fingerprint was {old[:12]}, "
            f"is {new[:12] if new else 'none'})"
        )
    old, new = saved.get("shares"), now.get("shares")
    in_partitions = now["options"].get("sampling") == "partition" and saved["position"]["batch"]
    if in_partitions and old is not None and old != new:
        refused.append(
            f"--sampling partition in the middle of an epoch: the images were partitioned among "
            f"{_describe_ranks(old)}, now among {_describe_ranks(new)}"
        )
    if refused:
        raise UserError(f"--resume: {run_name} cannot continue: {'; '.join(refused)}")


def _describe_ranks(facts):
    load = facts["load"]
    by = "" if load is None else " by --worker-load " + ",".join(f"{n / 1000:g}" for n in load)
    return f"{facts['ranks']} rank(s){by}"


def _difference(saved, now):
    """Describe the first difference between two lists of layers."""
    for old, new in zip(saved, now, strict=False):
        if old != new:
            name = new.get("name", "?")
            changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            return f"layer {name} differs in {', '.join(changed)}"
    return f"the run has {len(saved)} layers, this network has {len(now)}"
