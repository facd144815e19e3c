"""Where a run's options come from, what of them is written down, and what a resume may change.

The first of these that has a value: the command line, --config FILE.toml, the run that is resumed,
the network's recipe, the defaults (those of MATLAB's trainingOptions).
"""

import json
import platform
from typing import NamedTuple

from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.text import printable
from mpidl.training.options.option_types import SIZE, Rule, checked, nearest, one_of, share
from mpidl.training.options.training_options import (
    NAMES,
    OPTIONS,
    RUN,
    TrainingOptions,
    flag,
    recipe,
)
from mpidl.training.schedules import ENDING

TEXT = Rule(str, "a text", pattern="(?s).*")
RULES = {
    **{name: known.metadata["rule"] for name, known in OPTIONS.items()},
    **{name: TEXT._replace(optional=default is None) for name, default in RUN.items()},
    "test_fraction": share(),
    "colour": one_of("gray", "rgb", optional=True),
    **dict.fromkeys(("resize", "cover", "centre_crop"), SIZE),
}


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
    known = {name: value for _, known in reversed(layers) for name, value in known.items()}
    layers.append((f"recipe {network}", recipe(network, known)))
    layers.append(("default", {**{name: f.default for name, f in OPTIONS.items()}, **RUN}))

    values, sources = {}, {}
    for name in (*NAMES, *RUN):
        sources[name], known = next((s, known) for s, known in layers if name in known)
        spelled = flag(name) if sources[name] == "command line" else name
        if sources[name].startswith("config "):
            spelled = f"{config}: {name}"
        values[name] = checked(RULES[name], known[name], spelled)
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
        if isinstance(value, dict):
            raise UserError(f"{path}: unknown table [{name}]: expected [options] or [run]")
        if known not in RULES:
            raise UserError(f"{path}: unknown option {name}{nearest(known, RULES)}")
        values[known] = checked(RULES[known], value, f"{path}: {name}")
    return values


def write_options(path, resolved, versions):
    """Write options.toml: [options], [run], where each value came from, and what ran.

    `versions`: {"python": "3.11.7", ...}, see `versions_of`. None is written as "none".
    """
    import tomli_w

    def plain(table):
        table = {name: "none" if value is None else value for name, value in table.items()}
        return {name: printable(v) if isinstance(v, str) else v for name, v in table.items()}

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


def version_of(package):
    """The installed version of a package, in words where there is none."""
    from importlib import metadata  # 20 ms, which the ranks other than 0 save at their start

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def versions_of(mpi_library):
    """The versions that options.toml records; `mpi_library`: MPI's own text about itself."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "mpidl", "mpi4py"):
        versions[package] = version_of(package)
    first_line = (mpi_library.strip().splitlines() or ["unknown"])[0]
    return {**versions, "mpi": " ".join(first_line.replace("\0", "").split())}


def resumable(options, net, datastore, ranks):
    """What of a run as it is now `changed_on_resume` compares with a checkpoint."""
    store = options.validation
    return {
        "options": options.as_dict(),
        "network": net.spec(),
        "fingerprint": datastore.fingerprint(),
        "validation": {"fingerprint": None if store is None else store.fingerprint()},
        "shares": shares(options, ranks),
    }


def shares(options, ranks):
    """What the images of each rank depend on under `sampling="partition"`: {"ranks", "load"}."""
    load = options.load(ranks)
    return {"ranks": ranks, "load": None if load is None else list(load)}


def changed_on_resume(saved, now, where="the resumed run"):
    """Refuse what a resumed run may not change, by name.

    saved, now: the checkpoint's facts and `resumable`: the options, the network's list of layers,
    the fingerprints of the data, and by what they are shared out. The ranks may change but in the
    midst of an epoch of which each has a part. Raises UserError.
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
    schedule = now["options"].get("learn_rate_schedule")
    old, new = (table["options"].get("epochs") for table in (saved, now))
    if schedule in ENDING and new > old:
        refused.append(f"--epochs was {old}, is {new}, where --learn-rate-schedule {schedule} ends")
    network = json.loads(json.dumps(now["network"]))  # lists for tuples, as in the checkpoint
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
    parts = now["options"].get("sampling") == "partition" and saved["position"]["batch"]
    if parts and old is not None and old != new:
        refused.append(
            f"--sampling partition in the midst of an epoch: {_of_ranks(old)} shared it, are "
            f"{_of_ranks(new)}"
        )
    if refused:
        raise UserError(f"--resume: {where} cannot go on: {'; '.join(refused)}")


def _of_ranks(known):
    load = known["load"]
    by = "" if load is None else " by --worker-load " + ",".join(f"{n / 1000:g}" for n in load)
    return f"{known['ranks']} rank(s){by}"


def _difference(saved, now):
    """In words, where two lists of layers part."""
    for old, new in zip(saved, now, strict=False):
        if old != new:
            name = new.get("name", "?")
            changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            return f"layer {name} differs in {', '.join(changed)}"
    return f"{len(saved)} layers were trained, {len(now)} are given"
