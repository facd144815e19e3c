"""Write files as torch.save writes them, on machines without PyTorch too.

While a pickle is written, stand-ins for PyTorch's modules give its functions their names.
"""

import collections
import contextlib
import io
import pickle
import struct
import sys
import types
import zipfile
from unittest import mock

import numpy as np

CLASSES = {"float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage"}
CLASSES |= {"int64": "LongStorage", "uint8": "ByteStorage", "bool": "BoolStorage"}
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


class Storage:
    """A reference to the numbers of an array."""

    def __init__(self, key, array):
        self.key, self.array = key, array


class Tensor:
    """An array, which is pickled as PyTorch pickles a tensor."""

    def __init__(self, storage, offset, shape, strides):
        self.arguments = storage, offset, shape, strides, False, collections.OrderedDict()

    def __reduce__(self):
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.arguments


@contextlib.contextmanager
def stand_ins():
    """Within the block, the modules torch and torch._utils have the names that a file needs."""

    def _rebuild_tensor_v2(*arguments):
        raise AssertionError("a file is only written here")

    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = (
        "torch._utils",
        ("_rebuild_tensor_v2"),
    )
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    for name in CLASSES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))
    with mock.patch.dict(sys.modules, {"torch": torch, "torch._utils": utils}):
        yield torch


def pickled(value, torch):
    """Return the pickle of a value with tensors, and its storages."""
    storages = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            if not isinstance(obj, Storage):
                return None
            storages[obj.key] = obj.array
            kind = getattr(torch, CLASSES[obj.array.dtype.name])
            return "storage", kind, obj.key, "cpu", obj.array.size

    file = io.BytesIO()
    Pickler(file, 2).dump(value)
    return file.getvalue(), storages


def tensors(arrays):
    """Return a dictionary of tensors with these arrays, as a module's state_dict."""
    result = collections.OrderedDict()
    for i, (name, array) in enumerate(arrays.items()):
        array = np.asarray(array)
        strides = tuple(n // array.itemsize for n in array.strides)
        base = array if array.base is None else array.base
        result[name] = Tensor(Storage(str(i), base), 0, array.shape, strides)
    return result


def save(value, path, is_old=False):
    """Write a value with tensors, by default as a zip archive, and return the path."""
    with stand_ins() as torch:
        data, storages = pickled(value, torch)
        if is_old:
            parts = [pickle.dumps(part, 2) for part in (MAGIC, PROTOCOL, {"little_endian": True})]
            parts += [data, pickle.dumps(list(storages), 2)]
            parts += [struct.pack("<q", a.size) + a.tobytes() for a in storages.values()]
            path.write_bytes(b"".join(parts))
            return path
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        for key, array in storages.items():
            archive.writestr(f"archive/data/{key}", array.tobytes())
    return path
