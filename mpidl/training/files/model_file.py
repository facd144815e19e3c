"""model.h5, and the way all HDF5 files of a run are written and read.

A file holds tables of arrays, `<table>/<layer>/<name>`, in the order given, and root attributes.
Its attribute `sha256` covers both. It is put together in memory, written under another name,
flushed to disk, then renamed: it is there as a whole or not at all, and a full disk is an ordinary
error. It is read through Python's own file object, so that HDF5's file locks, which the file
systems of some clusters refuse, play no part. Nothing is ever unpickled.
"""

import hashlib
import io
import json
from dataclasses import asdict

import numpy as np

from mpidl.data.transforms import normalize
from mpidl.data.transforms.preprocess import Preprocess
from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.text import name_list

FORMAT_VERSION = 1


class Torn(Exception):
    """A file that is not the whole of what was written; the text says what is wrong with it."""


def pack(tables, attributes):
    """The bytes of an HDF5 file: the same for the same content.

    tables: {"learnables": {"conv1.weight": array, ...}, ...}; attributes: {name: text, whole number
    or list of whole numbers}.
    """
    import h5py

    buffer = io.BytesIO()
    # From HDF5 1.8 on, the file's own tables are checksummed and attributes may exceed 64 KiB.
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
        file.attrs["sha256"] = _digest(*_content(file))
    return buffer.getbuffer()


def read(path):
    """(tables, attributes) of a file that `pack` made; raises Torn."""
    import h5py

    try:
        with open(path, "rb") as raw, h5py.File(raw, "r") as file:
            if _plain(file.attrs.get("format")) != "mpidl":
                raise Torn("it is not a file of mpidl")
            version = _plain(file.attrs.get("format_version"))
            if version != FORMAT_VERSION:
                raise Torn(f"its format_version is {version}, this mpidl reads {FORMAT_VERSION}")
            tables, attributes = _content(file)
            checksum = _plain(file.attrs.get("sha256"))
    except Torn:
        raise
    except FileNotFoundError as error:
        raise Torn("it is missing") from error
    except IsADirectoryError as error:
        raise Torn("it is a folder, not a file") from error
    except Exception as error:  # whatever h5py makes of damaged bytes
        reason = str(error).split("\n")[0] or type(error).__name__
        raise Torn(f"it cannot be read: {reason}") from error
    if checksum != _digest(tables, attributes):
        raise Torn("its content does not match its checksum")
    return tables, attributes


def _content(file):
    """({table: {name: array}}, {attribute: value}) of an open file, but for its checksum."""
    tables = {table: dict(_arrays(group, "")) for table, group in file.items()}
    attributes = {name: _plain(value) for name, value in file.attrs.items() if name != "sha256"}
    return tables, attributes


def _arrays(group, prefix):
    for name, item in group.items():
        if hasattr(item, "items"):
            yield from _arrays(item, f"{prefix}{name}.")
        else:
            yield prefix + name, np.asarray(item[()])


def _plain(value):
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _digest(tables, attributes):
    """SHA-256 over all names, types, shapes, bytes and attributes."""
    digest = hashlib.sha256()
    for table, arrays in tables.items():
        for name, array in arrays.items():
            array = np.asarray(array)
            digest.update(json.dumps([table, name, array.dtype.str, array.shape]).encode())
            digest.update(np.ascontiguousarray(array))
    digest.update(json.dumps(sorted(attributes.items())).encode())
    return digest.hexdigest()


def describe(layers, classes, input_shape, normalization, crop=None, preprocess=None):
    """The root attributes that say what the network is; `layers`: the list of their specs.

    classes, crop, preprocess: what a network knows of what it was trained on, see `Network`.
    """
    found = {
        "network": json.dumps(layers),
        "classes": json.dumps(None if classes is None else list(classes)),
        "input_shape": [int(n) for n in input_shape],
        "normalization": normalization,
    }
    if crop is not None:
        found["crop"] = [int(n) for n in crop]
    if preprocess:
        found["preprocess"] = json.dumps(asdict(preprocess))
    return found


def described(attributes):
    """`describe` undone: {"network", "classes", "input_shape", "normalization"}, and "crop" and
    "preprocess" where there are any."""
    found = {
        "network": json.loads(attributes["network"]),
        "classes": json.loads(attributes["classes"]),
        "input_shape": tuple(attributes["input_shape"]),
        "normalization": attributes["normalization"],
    }
    if "crop" in attributes:
        found["crop"] = tuple(attributes["crop"])
    if "preprocess" in attributes:
        found["preprocess"] = Preprocess(**json.loads(attributes["preprocess"]))
    return found


def save_model(path, net, classes=None, normalization=None):
    """Write a trained network, with what it was told of the images.

    classes: the names of the classes that its outputs are scores of, [] of outputs that are
    numbers; the network's own where not given, which `dl.train` sets. normalization:
    "rescale-zero-one", where the network does not know it. Raises UserError where there are not as
    many classes as outputs, or the file cannot be written.
    """
    classes = net.classes if classes is None else tuple(map(str, classes))
    if classes and net.output_shape[:1] != (len(classes),):
        raise UserError(
            f"{path}: classes: expected a name for each output of the network, of shape "
            f"{net.output_shape}, found {len(classes)} ({name_list(classes)})"
        )
    how, tables = normalization or normalize.USUAL, {}
    if net.normalization is not None:
        how, tables["normalization"] = net.normalization.name, net.normalization.arrays()
    attributes = describe(net.spec(), classes, net.input_shape, how, net.crop, net.preprocess)
    tables = {name: arrays for name, arrays in tables.items() if arrays}
    tables = {"learnables": net.parameters, "state": net.state, **tables}
    write_whole(path, pack(tables, attributes))


def load_model(path):
    """(net, {"classes", "input_shape", "normalization", "network"}). Raises UserError.

    The network normalizes, and cuts, as it did in training, and knows its classes' names.
    """
    from mpidl.nn import Network

    try:
        tables, attributes = read(path)
        info = described(attributes)
        net = Network.from_spec(info["network"], info["input_shape"])
        arrays, channels = tables.get("normalization", {}), net.input_shape[0]
        net.normalization = normalize.read(info["normalization"], arrays, channels)
        net.normalization.check(net.input_shape)
        net.crop, net.preprocess = info.get("crop"), info.get("preprocess")
        net.classes = None if info["classes"] is None else tuple(info["classes"])
    except Torn as error:
        raise UserError(f"{path}: not a model that can be loaded: {error}") from error
    except KeyError as error:
        raise UserError(f"{path}: not a model: it has no attribute {error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: its network cannot be built: {error}") from error
    net.parameters = matching(net.parameters, tables.get("learnables", {}), path)
    net.state = matching(net.state, tables.get("state", {}), path)
    return net, info


def matching(expected, found, path):
    """`found` in the order of `expected`; UserError where a name or a shape differs."""
    for name in [*expected, *found]:
        old = expected[name].shape if name in expected else "nothing"
        new = found[name].shape if name in found else "nothing"
        if old != new:
            raise UserError(f"{path}: {name}: the network has {old}, the file {new}")
    return {name: found[name] for name in expected}


def weights_sha256(net):
    """SHA-256 over all learnables, then all state, in table order, as little-endian float32."""
    digest = hashlib.sha256()
    for array in (*net.parameters.values(), *net.state.values()):
        digest.update(np.ascontiguousarray(array, "<f4"))
    return digest.hexdigest()
