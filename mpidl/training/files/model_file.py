"""Read and write model files in the HDF5 format that checkpoints also use.

A file contains root attributes and tables of arrays, `<table>/<layer>/<name>`, in a fixed order.
The attribute `sha256` is a checksum of the arrays and the other attributes. `pack` builds the bytes
of a file in memory, and `write_whole` writes the bytes. A file is therefore either complete or
absent, and a full disk raises an ordinary error.

Files are read through a Python file object, because some cluster file systems reject HDF5's file
locks. `hdf5_probe` first tests whether a file can be read, because HDF5 may crash or hang on a
damaged file before the checksum can be compared. No content is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np

from mpidl import losses
from mpidl.data.transforms import normalize
from mpidl.errors import UserError
from mpidl.files import check_regular, stamp, write_whole
from mpidl.nn import Layer, Network
from mpidl.nn.network_check import need_network
from mpidl.ranks.failure import launched_ranks
from mpidl.text import name_list

if TYPE_CHECKING:
    from mpidl.data.transforms.preprocess import Preprocess

FORMAT_VERSION = 1


class _Description(TypedDict):
    network: list[dict[str, object]]  # the layers' specs
    classes: list[str] | None
    input_shape: tuple[int, ...]
    normalization: str


class Description(_Description, total=False):
    """The decoded root attributes of a model file: the network and the image preprocessing."""

    crop: tuple[int, ...]
    preprocess: Preprocess
    loss: dict[str, str | int]
    unwhitened: list[str]  # names of layers whose filters have not been computed yet
    input_function: str  # see `Network.input_function`
    trained_precision: str  # see `Network.trained_precision`
    numerics: int  # see `Network.numerics`, also for the next entry
    mpidl_version: str


class Torn(Exception):
    """Raised if a file is missing, damaged or incomplete. The message describes the problem."""


def pack(
    tables: Mapping[str, Mapping[str, np.ndarray]], attributes: Mapping[str, Any]
) -> memoryview:
    """Return the bytes of an HDF5 file. Equal contents give equal bytes.

    Parameters
    ----------
    tables : dict
        {"learnables": {"conv1.weight": array, ...}, ...}
    attributes : dict
        {name: value}. A value is a string, an integer or a list of integers.
    """
    import h5py

    buffer = io.BytesIO()
    # The HDF5 1.8 format adds checksums to metadata and allows attributes larger than 64 KiB.
    with h5py.File(buffer, "w", libver=("v108", "v108"), track_order=True) as file:
        for table, arrays in tables.items():
            group = file.create_group(table, track_order=True)
            for name, array in arrays.items():
                inner = group
                *groups, last = name.split(".")
                for step in groups:
                    if step not in inner:
                        inner.create_group(step, track_order=True)
                    inner = inner[step]
                array = np.asarray(array)
                array = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
                inner.create_dataset(last, data=array, track_times=False)
        for name, value in attributes.items():
            file.attrs[name] = value
        file.attrs["format"] = "mpidl"
        file.attrs["format_version"] = FORMAT_VERSION
        groups = ((table, _arrays(group, "")) for table, group in file.items())
        file.attrs["sha256"] = _digest(groups, _attributes(file))
    return buffer.getbuffer()


def read(path: str | os.PathLike[str]) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """Return the tables and attributes of a file that `pack` created.

    Raises
    ------
    Torn
        If the file is missing, damaged or in another format.
    """
    try:
        check_regular(status := os.stat(path))
        several = launched_ranks() is not None
        version = status.st_ino, *stamp(status)
        from mpidl.data.formats import hdf5_probe  # only for reading

        problem = hdf5_probe.problem_of(path, version, is_shared=several)
        if problem is not None:
            raise Torn(f"it cannot be read: {problem}")
        import h5py

        with open(path, "rb") as raw, h5py.File(raw, "r") as file:
            if _plain(file.attrs.get("format")) != "mpidl":
                raise Torn("it was not written by mpidl")
            version = _plain(file.attrs.get("format_version"))
            if version != FORMAT_VERSION:
                raise Torn(
                    f"its format_version is {version}, but this version of mpidl reads "
                    f"{FORMAT_VERSION}"
                )
            tables = {table: dict(_arrays(group, "")) for table, group in file.items()}
            attributes = _attributes(file)
            checksum = _plain(file.attrs.get("sha256"))
    except Torn:
        raise
    except FileNotFoundError as error:
        raise Torn("it is missing") from error
    except IsADirectoryError as error:
        raise Torn("it is a folder, not a file") from error
    except Exception as error:  # damaged bytes make h5py raise many types of exceptions
        reason = str(error).split("\n")[0] or type(error).__name__
        raise Torn(f"it cannot be read: {reason}") from error
    groups = ((table, arrays.items()) for table, arrays in tables.items())
    if checksum != _digest(groups, attributes):
        raise Torn("its content does not match its checksum")
    return tables, attributes


def _attributes(file):
    """Return the attributes of an open file, without the checksum."""
    return {name: _plain(value) for name, value in file.attrs.items() if name != "sha256"}


def _arrays(group, prefix):
    for name, item in group.items():
        if hasattr(item, "items"):
            yield from _arrays(item, f"{prefix}{name}.")
        else:
            yield prefix + name, np.asarray(item[()])


def _plain(value):
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _digest(tables, attributes):
    """Return the SHA-256 of all attributes and of all arrays with their names, types and shapes.

    `tables` is an iterable of (table name, iterable of (array name, array)). It is consumed lazily,
    so only one array at a time is in memory.
    """
    digest = hashlib.sha256()
    for table, arrays in tables:
        for name, array in arrays:
            array = np.asarray(array)
            digest.update(json.dumps([table, name, array.dtype.str, array.shape]).encode())
            digest.update(np.ascontiguousarray(array))
    digest.update(json.dumps(sorted(attributes.items())).encode())
    return digest.hexdigest()


def _preprocess(text):
    from mpidl.data.transforms.preprocess import Preprocess

    return Preprocess(**json.loads(text))


def _integers(values):
    return [int(n) for n in values]


# {key of a `Description`: (its value as a root attribute of a file, and the inverse)}
CODING: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "network": (json.dumps, json.loads),
    "classes": (lambda names: json.dumps(None if names is None else list(names)), json.loads),
    "input_shape": (_integers, tuple),
    "normalization": (str, str),
    "crop": (_integers, tuple),
    "preprocess": (lambda preprocess: json.dumps(asdict(preprocess)), _preprocess),
    "loss": (json.dumps, json.loads),
    "unwhitened": (json.dumps, json.loads),
    "input_function": (str, str),
    "trained_precision": (str, str),
    "numerics": (int, int),
    "mpidl_version": (str, str),
}
REQUIRED = ("network", "classes", "input_shape", "normalization")


def describe(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the root attributes of a file for a `Description`; other keys are ignored."""
    return {
        name: encode(description[name])
        for name, (encode, _) in CODING.items()
        if name in REQUIRED or description.get(name)
    }


def described(attributes: Mapping[str, Any]) -> Description:
    """Decode the root attributes of a file; this is the inverse of `describe`."""
    values = {
        name: decode(attributes[name])
        for name, (_, decode) in CODING.items()
        if name in REQUIRED or name in attributes
    }
    return cast(Description, values)


def network_of(
    description: Description,
    normalization: dict[str, np.ndarray],
    layer_types: Iterable[type[Layer]] = (),
) -> Network:
    """Create the network that a file describes, with all learnables and state set to 0.

    Parameters
    ----------
    description : dict
        The result of `described`.
    normalization : dict
        The arrays of the normalization, as returned by `Normalization.arrays`.
    layer_types : iterable of Layer classes
        The custom layer classes in the network.

    Raises
    ------
    TypeError, ValueError, UserError
        If the description is invalid.
    """
    net = Network.from_spec(
        description["network"], description["input_shape"], layer_types=layer_types, seed=None
    )
    channels = net.input_shape[0]
    net.normalization = normalize.read(description["normalization"], normalization, channels)
    if net.normalization.is_known:
        net.normalization.check(net.input_shape)
    net.crop, net.preprocess = description.get("crop"), description.get("preprocess")
    net.loss = losses.check_trained_loss(description.get("loss"))
    net.input_function = description.get("input_function")
    net.trained_precision = description.get("trained_precision")
    net.numerics = description.get("numerics")
    net.mpidl_version = description.get("mpidl_version")
    classes = description["classes"]
    if classes is not None and not (
        isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    ):
        raise ValueError(f"classes: expected a list of names, found {classes!r:.100}")
    if classes and net.output_shape[:1] != (len(classes),):
        raise ValueError(f"{len(classes)} classes for outputs of shape {net.output_shape}")
    net.classes = None if classes is None else tuple(classes)
    names = description.get("unwhitened", [])
    if not isinstance(names, list) or not set(names) <= set(net.unwhitened):
        raise ValueError(f"unwhitened: expected names of whitening layers, found {names!r:.100}")
    return net


def description_of(net: Network) -> dict[str, Any]:
    """Return the root attributes of a file that describe `net` with its class names."""
    return describe(_description(net))


def _description(net):
    return {
        "network": net.spec(),
        "classes": net.classes,
        "input_shape": net.input_shape,
        "normalization": normalize.USUAL if net.normalization is None else net.normalization.name,
        "crop": net.crop,
        "preprocess": net.preprocess,
        "loss": net.loss,
        "unwhitened": net.unwhitened,
        "input_function": net.input_function,
        "trained_precision": net.trained_precision,
        "numerics": net.numerics,
        "mpidl_version": net.mpidl_version,
    }


def save_model(
    path: str | os.PathLike[str],
    net: Network,
    classes: Iterable[str] | None = None,
    normalization: str | None = None,
) -> None:
    """Write a trained network with its class names and the preprocessing of its images.

    Parameters
    ----------
    path : path
        The file to write.
    net : Network
        The network.
    classes : iterable of str, optional
        One class name for each output of the network, or [] if the network predicts numbers. The
        default is `net.classes`, which `dl.train` sets.
    normalization : str, optional
        Name of the normalization to record if `net.normalization` is None. The default is
        "rescale-zero-one".

    Raises
    ------
    UserError
        If the number of classes differs from the number of outputs, or if the file cannot be
        written.
    """
    need_network(net)
    classes = net.classes if classes is None else tuple(map(str, classes))
    if classes and net.output_shape[:1] != (len(classes),):
        raise UserError(
            f"{path}: classes: expected a name for each output of the network, of shape "
            f"{net.output_shape}, found {len(classes)} ({name_list(classes)})"
        )
    description = _description(net) | {"classes": classes}
    tables = {"learnables": net.parameters, "state": net.state}
    if net.normalization is None:
        description["normalization"] = normalization or normalize.USUAL
    elif arrays := net.normalization.arrays():
        tables["normalization"] = arrays
    write_whole(path, pack(tables, describe(description)))


def load_model(
    path: str | os.PathLike[str], layers: Iterable[type[Layer]] = ()
) -> tuple[Network, Description]:
    """Load a trained network.

    Parameters
    ----------
    path : path
        The model file.
    layers : iterable of Layer classes
        The custom layer classes in the network.

    Returns
    -------
    net : Network
        The network, with its class names and the image preprocessing that was used in training.
    description : dict
        A dict with the keys "network" (the list of layers), "classes", "input_shape" and
        "normalization", and with "crop", "preprocess", "loss", "unwhitened", "input_function",
        "trained_precision", "numerics" and "mpidl_version" if the file has these attributes.

    Raises
    ------
    UserError
        If the file is damaged or not a model, or if the class of a layer is unknown.
    """
    if not isinstance(layers, Iterable) or isinstance(layers, str):
        raise UserError(f"layers: expected a list of layer classes, found {layers!r}")
    layers = list(layers)
    for kind in layers:
        if not (isinstance(kind, type) and issubclass(kind, Layer)):
            raise UserError(f"layers: expected classes derived from dl.Layer, found {kind!r}")
    try:
        tables, attributes = read(path)
        description = described(attributes)
        net = network_of(description, tables.get("normalization", {}), layers)
    except Torn as error:
        raise UserError(f"{path}: the model cannot be loaded: {error}") from error
    except KeyError as error:
        raise UserError(f"{path}: not a model: it has no attribute {error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: its network cannot be built: {error}") from error
    net.parameters = matching(net.parameters, tables.get("learnables", {}), path)
    net.state = matching(net.state, tables.get("state", {}), path)
    net.unwhitened = description.get("unwhitened", [])
    return net, description


def matching(
    expected: Mapping[str, np.ndarray],
    arrays: Mapping[str, np.ndarray],
    path: str | os.PathLike[str],
) -> dict[str, np.ndarray]:
    """Return the arrays of a file in the order of `expected`, the arrays of the network.

    Raises
    ------
    UserError
        If the names or the shapes of the arrays differ.
    """
    for name in [*expected, *arrays]:
        network_shape = expected[name].shape if name in expected else "no such array"
        file_shape = arrays[name].shape if name in arrays else "no such array"
        if network_shape != file_shape:
            raise UserError(
                f"{path}: {name}: the network has {network_shape}, the file {file_shape}"
            )
    return {name: arrays[name] for name in expected}


def weights_sha256(net: Network) -> str:
    """Return the SHA-256 digest of all learnables and all state as little-endian float32.

    Parameters
    ----------
    net : Network
        The network.

    Returns
    -------
    str
        The digest, 64 hexadecimal digits. Two networks have the same digest if and only if their
        weights have the same bytes.
    """
    return sha256_of(net.parameters, net.state)


def sha256_of(learnables: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> str:
    """Return the digest of `weights_sha256` for the given arrays of a network."""
    sha256 = hashlib.sha256()
    for array in (*learnables.values(), *state.values()):
        sha256.update(np.ascontiguousarray(array, "<f4"))
    return sha256.hexdigest()
