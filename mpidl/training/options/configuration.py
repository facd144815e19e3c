"""Merge the sources of a run's options, and record the result.

The sources are, from highest to lowest precedence: the command line, --config FILE.toml, the
resumed run, the network's recipe, and the defaults. The defaults are the same as in MATLAB's
trainingOptions.
"""

import os
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpidl import numerics
from mpidl.errors import UserError
from mpidl.files import read_toml, write_whole
from mpidl.options.declaration import check_value, rule_of
from mpidl.text import printable
from mpidl.training.options.run_inputs import INPUTS
from mpidl.training.options.training_options import (
    OPTIONS,
    TrainingOptions,
    nearest,
    recipe_options,
)

WEIGHTS = "weights"  # source of a normalization that is stored in the weight file
RECORDS = ("sources", "versions", "weights_file")  # tables of options.toml that contain no options
DECLARED = OPTIONS | INPUTS  # {name: declaration} of all names that a TOML file may set


class Resolved(NamedTuple):
    """The options and inputs of a run, with the source of each value."""

    options: TrainingOptions
    run: dict[str, Any]  # {name: value} of the inputs
    sources: dict[str, str]  # such as {"epochs": "command line"}


def resolve(
    typed: Mapping[str, Any],
    *,
    config: str | os.PathLike[str] | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merge the sources of a run's options; raise UserError if a name or a value is invalid.

    Parameters
    ----------
    typed : mapping
        {name: value} from the command line, which has checked the values. Other names are ignored.
    config : path, optional
        A TOML file with options, as given by --config.
    resumed : mapping, optional
        {"options": {...}, "run": {...}} from the checkpoint of the resumed run.
    """
    layers = [("command line", {n: v for n, v in typed.items() if n in DECLARED})]
    if config is not None:
        layers.append((f"config {config}", read_config(config)))
    if resumed is not None:
        # Checkpoints of the command `train` contain "run"; checkpoints of `dl.train` do not.
        layers.append(("resumed run", {**resumed["options"], **resumed.get("run", {})}))
    merged = {name: value for _, table in reversed(layers) for name, value in table.items()}
    usual = INPUTS["network"].default if merged.get("weights") is None else None
    network = merged.get("network", usual)
    layers.append((f"recipe {network}", recipe_options(network, merged)))
    layers.append(
        ("default", {name: f.default for name, f in DECLARED.items()} | {"network": usual})
    )

    values, sources = {}, {}
    for name in DECLARED:
        sources[name], table = next((s, table) for s, table in layers if name in table)
        is_unchecked = sources[name] == "resumed run"  # the other sources have checked their values
        values[name] = _checked(name, table[name]) if is_unchecked else table[name]
    _refuse_two_batch_sizes(values, sources, [source for source, _ in layers])
    run = {name: values.pop(name) for name in INPUTS}
    return Resolved(TrainingOptions(**values), run, sources)


def _checked(name, value, spelled=None):
    """Return the value of an option, converted; raise UserError if it is invalid."""
    return check_value(rule_of(DECLARED[name]), value, spelled or name)


def _refuse_two_batch_sizes(values, sources, order):
    """Raise UserError if a batch size per rank would silently override the user's batch size.

    It would if it came from a source with the same or lower precedence.
    """
    size, per_rank = sources["batch_size"], sources["batch_per_rank"]
    by_user = size == "command line" or size.startswith("config ")
    is_set = values["batch_per_rank"] is not None
    if by_user and is_set and order.index(size) <= order.index(per_rank):
        raise UserError(
            f"--batch-size {values['batch_size']} ({size}) and --batch-per-rank "
            f"{values['batch_per_rank']} ({per_rank}): expected at most one of them"
        )


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read options and inputs of a run from a TOML file, as {name: value} with underscores.

    Options are at the top level or in the table [options]; inputs are in the table [run]. The file
    may be the options.toml of an earlier run, whose other tables are ignored. Raises UserError if
    the file cannot be read or is not valid TOML, or if a name or a value is invalid.
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
        if option not in DECLARED:
            raise UserError(f"{path}: unknown option {name}{nearest(option, DECLARED)}")
        values[option] = _checked(option, value, f"{path}: {name}")
    return values


def write_options(
    path: str | os.PathLike[str],
    resolved: Resolved,
    versions: Mapping[str, str],
    weights_file: Mapping[str, str] | None = None,
) -> None:
    """Write the options and inputs of a run, their sources and software versions to a TOML file.

    None is written as "none". The file omits options whose values follow from other options or from
    the weight file. `versions` is the result of `versions_of`, and `weights_file` has the path and
    the SHA-256 of the weight file, if there is one.
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
    """Return the versions of Python, NumPy, mpidl, its numerics, mpi4py and MPI for options.toml.

    `mpi_library` is the version string of the MPI library, of which the first line is recorded.
    """
    versions = {"python": platform.python_version()}
    for package in ("numpy", "mpidl", "mpi4py"):
        versions[package] = version_of(package)
    first_line = (mpi_library.strip().splitlines() or ["unknown"])[0]
    versions["numerics"] = str(numerics.VERSION)
    return {**versions, "mpi": " ".join(first_line.replace("\0", "").split())}
