"""The sources of a run's options, the record of them, and what a resumed run may change.

The sources in order of precedence: the command line, --config FILE.toml, the resumed run, the
network's recipe, the defaults (those of MATLAB's trainingOptions).
"""

import json
import os
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpidl.data.datastore import Datastore
from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.nn import Network
from mpidl.text import printable
from mpidl.training.options.option_types import (
    SIZE,
    Rule,
    check_value,
    fraction,
    nearest,
    one_of,
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

TEXT = Rule(str, "a text", pattern="(?s).*")
RULES: dict[str, Rule] = {
    **{name: rule_of(declared) for name, declared in OPTIONS.items()},
    **{name: TEXT._replace(optional=default is None) for name, default in RUN.items()},
    "test_fraction": fraction(),
    "colour": one_of("gray", "rgb", optional=True),
    **dict.fromkeys(("resize", "cover", "centre_crop"), SIZE),
}


class Resolved(NamedTuple):
    """The options of a run and their sources.

    Attributes
    ----------
    options : TrainingOptions
        The options.
    run : dict
        The inputs of the run by name: network, data, test_data and the others of `RUN`.
    sources : dict
        The source of each value by its name, such as "command line".
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
        A TOML file.
    resumed : mapping, optional
        {"options": {...}, "run": {...}} from the checkpoint of the resumed run.

    Returns
    -------
    Resolved

    Raises
    ------
    UserError
        If the file cannot be used, or an option does not take its value.
    """
    layers = [("command line", {n: v for n, v in typed.items() if n in OPTIONS or n in RUN})]
    if config is not None:
        layers.append((f"config {config}", read_config(config)))
    if resumed is not None:
        # The checkpoint of dl.train does not name a network and data as the command does.
        layers.append(("resumed run", {**resumed["options"], **resumed.get("run", {})}))
    network = next((table["network"] for _, table in layers if "network" in table), RUN["network"])
    merged = {name: value for _, table in reversed(layers) for name, value in table.items()}
    layers.append((f"recipe {network}", recipe_options(network, merged)))
    layers.append(("default", {**{name: f.default for name, f in OPTIONS.items()}, **RUN}))

    values, sources = {}, {}
    for name in (*NAMES, *RUN):
        source, table = next((source, table) for source, table in layers if name in table)
        spelled = flag(name) if source == "command line" else name
        if source.startswith("config "):
            spelled = f"{config}: {name}"
        values[name], sources[name] = table[name], source
        if source != "default":  # None stands for the solver's there, and may not be written
            values[name] = check_value(RULES[name], table[name], spelled)
    _refuse_two_batch_sizes(values, sources, [source for source, _ in layers])
    run = {name: values.pop(name) for name in RUN}
    return Resolved(TrainingOptions(**values), run, sources)


def _refuse_two_batch_sizes(values, sources, order):
    """Refuse a batch size of the user that comes with, or before, a batch size per rank."""
    size, per_rank = sources["batch_size"], sources["batch_per_rank"]
    by_user = size == "command line" or size.startswith("config ")
    if (
        by_user
        and values["batch_per_rank"] is not None
        and order.index(size) <= order.index(per_rank)
    ):
        raise UserError(
            f"--batch-size {values['batch_size']} ({size}) and --batch-per-rank "
            f"{values['batch_per_rank']} ({per_rank}): expected one of them"
        )


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the options of a TOML file.

    Options stand at the top or in [options], the inputs of a run in [run]. The options.toml of a
    run is such a file; its [sources] and [versions] are ignored.

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
        If the file cannot be read, or has an unknown name or a value that an option does not take.
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
        option = name.replace("-", "_")
        if isinstance(value, dict):
            raise UserError(f"{path}: unknown table [{name}]: expected [options] or [run]")
        if option not in RULES:
            raise UserError(f"{path}: unknown option {name}{nearest(option, RULES)}")
        values[option] = check_value(RULES[option], value, f"{path}: {name}")
    return values


def write_options(
    path: str | os.PathLike[str], resolved: Resolved, versions: Mapping[str, str]
) -> None:
    """Write options.toml: the options, the inputs of the run, their sources, and versions.

    None is written as "none".

    Parameters
    ----------
    path : path
        The file to write.
    resolved : Resolved
        The options of the run.
    versions : mapping
        {"python": "3.11.7", ...}, see `versions_of`.
    """
    import tomli_w

    def plain(table):
        table = {name: "none" if value is None else value for name, value in table.items()}
        return {name: printable(v) if isinstance(v, str) else v for name, v in table.items()}

    options = resolved.options.as_dict()
    if options["batch_per_rank"] is not None:  # it implies the batch size
        del options["batch_size"]
    tables = {
        "options": plain(options),
        "run": plain(resolved.run),
        "sources": plain(resolved.sources),
        "versions": plain(versions),
    }
    write_whole(path, tomli_w.dumps(tables).encode())


def version_of(package: str) -> str:
    """Return the installed version of a package, or that it is not installed."""
    from importlib import metadata  # imported late: only rank 0 needs it, and it takes 20 ms

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def versions_of(mpi_library: str) -> dict[str, str]:
    """Return the versions that options.toml records.

    Parameters
    ----------
    mpi_library : str
        The MPI library's description of itself; its first line is recorded.
    """
    versions = {"python": platform.python_version()}
    for package in ("numpy", "mpidl", "mpi4py"):
        versions[package] = version_of(package)
    first_line = (mpi_library.strip().splitlines() or ["unknown"])[0]
    return {**versions, "mpi": " ".join(first_line.replace("\0", "").split())}


def resumable(
    options: TrainingOptions, net: Network, datastore: Datastore, ranks: int
) -> dict[str, Any]:
    """Return the facts of a run that `changed_on_resume` compares with those of a checkpoint."""
    store = options.validation
    return {
        "options": options.as_dict(),
        "network": net.spec(),
        "fingerprint": datastore.fingerprint(),
        "validation": {"fingerprint": None if store is None else store.fingerprint()},
        "shares": shares(options, ranks),
    }


def shares(options: TrainingOptions, ranks: int) -> dict[str, Any]:
    """Return what each rank's images depend on if sampling is "partition": {"ranks", "load"}."""
    load = options.load(ranks)
    return {"ranks": ranks, "load": None if load is None else list(load)}


def changed_on_resume(
    saved: Mapping[str, Any], now: Mapping[str, Any], run_name: str = "the resumed run"
) -> None:
    """Refuse changes that a resumed run may not make.

    The number of ranks may change, except in the middle of an epoch that is partitioned among
    them.

    Parameters
    ----------
    saved : mapping
        The facts of the checkpoint.
    now : mapping
        The facts of the run as it is now, from `resumable`: its options, its network's list of
        layers, the fingerprints of its data, and how the data are shared out.
    run_name : str
        The run's name for the error message.

    Raises
    ------
    UserError
        If the run changed; the message names each change.
    """
    refused = []
    # A checkpoint from before an option existed has its default.
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
        refused.append(f"--epochs was {old}, is {new}, where --learn-rate-schedule {schedule} ends")
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
            f"--sampling partition in the middle of an epoch: it was partitioned among "
            f"{_describe_ranks(old)}, is among {_describe_ranks(new)}"
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
    return f"{len(saved)} layers were trained, {len(now)} are given"
