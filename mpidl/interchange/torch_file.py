"""Read the arrays of PyTorch's files (.pt, .pth, .bin) without running any code of the file.

Such a file is a pickle: a program for a stack machine that may call any function of Python. Here,
`_Machine` interprets the few instructions that build dictionaries, lists and numbers. An
instruction that imports something only notes its name. `value_of_call` recognizes the calls that
rebuild a tensor; nobody executes other calls, which stand for None. A value may refer to another
one many times, so nothing here prints or walks through a value whose size the file does not limit.

A file has one of two formats. Since PyTorch 1.6, it is a zip archive with the pickle `data.pkl` and
a member `data/KEY` for each storage, the array of numbers of one or more tensors. Earlier files
begin with three short pickles, then the pickle, a pickled list of keys, and the storages.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import numpy as np

from mpidl.core.values import BF16
from mpidl.errors import UserError
from mpidl.files import check_regular, unreadable
from mpidl.text import printable

MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of the older format
MOST_INSTRUCTIONS = 10_000_000
MOST_AXES = 32
MOST_COPIES = 16  # bytes of all arrays, divided by those of the file: tensors may share a storage
DAMAGES = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError)
DAMAGES += (
    RuntimeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    NotImplementedError,
    EOFError,
)
NUMBERS = {  # {class of a storage in PyTorch: type of its numbers}
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}
# Entries of a dictionary that may hold the arrays, beside other facts about a training.
TABLES = ("state_dict", "model_state_dict", "model", "net", "params")


class Global(NamedTuple):
    """The name of a function or class that the file imports, such as "torch._utils.f"."""

    name: str


class Stored(NamedTuple):
    """A reference to a storage: the type of its numbers and its key."""

    kind: str
    key: str


class Tensor(NamedTuple):
    """A tensor: numbers of a storage from `offset`, with a stride per axis, counted in numbers."""

    storage: Stored
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Machine:
    """The stack machine of one pickle. `run` returns the value that it builds."""

    def __init__(self) -> None:
        self.storages: dict[str, Stored] = {}  # {key: each storage to which the pickle refers}
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # the stacks below the marks
        self.memo: dict[int, Any] = {}

    def run(self, file: IO[bytes]) -> Any:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(file)):
            if count > MOST_INSTRUCTIONS:
                raise ValueError("its pickle has too many instructions")
            if instruction.name == "STOP":
                return self.stack.pop()
            self.step(instruction.name, argument)
        raise ValueError("its pickle does not end")

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in CONSTANTS:
            stack.append(CONSTANTS[name]())
        elif name in NUMBERED:
            stack.append(argument)
        elif name == "MARK":
            self.marks.append(stack)
            self.stack = []
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[int(argument)])
        elif name == "GLOBAL":
            stack.append(Global(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            function, module = stack.pop(), stack.pop()
            if not (isinstance(module, str) and isinstance(function, str)):
                raise ValueError("it imports something without a name")
            stack.append(Global(f"{module}.{function}"))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            values = [stack.pop() for _ in range(int(name[-1]))]
            stack.append(tuple(values[::-1]))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(value_of_call(function, arguments))
        elif name == "BINPERSID":
            stored = stored_of(stack.pop())
            if stored is not None:
                self.storages[stored.key] = stored
            stack.append(stored)
        elif name == "BUILD":
            stack.pop()  # attributes of the object below, such as the versions of modules
        elif name in ("APPEND", "SETITEM"):
            count = 1 + (name == "SETITEM")
            values = [stack.pop() for _ in range(count)]
            _extend(stack[-1], values[::-1])
        elif name in ("APPENDS", "SETITEMS", "ADDITEMS"):
            values, self.stack = stack, self.marks.pop()
            _extend(self.stack[-1], values)
        elif name in ("TUPLE", "LIST", "DICT"):
            values, self.stack = stack, self.marks.pop()
            self.stack.append(_collection(name, values))
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"its pickle has the instruction {name}")


CONSTANTS: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_SET": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
NUMBERED = {"BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG", "BINFLOAT", "FLOAT"}
NUMBERED |= {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING"}
NUMBERED |= {"SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"}


def _extend(target, values):
    if isinstance(target, dict):
        # A table of tensors has only names as keys, so all other keys count as one.
        keys = [key if isinstance(key, str) else None for key in values[::2]]
        target.update(zip(keys, values[1::2], strict=True))
    elif isinstance(target, list):
        target += values


def _collection(name, values):
    if name == "DICT":
        result: dict[Any, Any] = {}
        _extend(result, values)
        return result
    return tuple(values) if name == "TUPLE" else values


def value_of_call(function: Any, arguments: Any) -> Any:
    """Return what a call in a file stands for: a dictionary, a tensor, or None."""
    if function == Global("collections.OrderedDict"):
        return {}
    if function == Global("torch._utils._rebuild_tensor_v2"):
        storage, offset, shape, strides, *rest = arguments
        if any(rest[2:]):  # marks of a view whose numbers are negated
            raise ValueError("a tensor is a view that is not supported")
        if not len(strides) == len(shape) <= MOST_AXES:
            raise ValueError("a tensor has an impossible shape")
        return Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))
    if function == Global("torch._utils._rebuild_parameter"):
        return arguments[0]
    return None


def stored_of(reference: Any) -> Stored | None:
    """Return the storage to which a persistent reference of a pickle refers.

    Return None if it refers to something else, such as the source of a module.
    """
    if reference[0] != "storage":
        return None
    _, kind, key, _, _, *view = reference
    if not (isinstance(kind, Global) and isinstance(key, str)):
        raise ValueError("a storage has no type or no key")
    name = kind.name.rpartition(".")[2]
    if name not in {*NUMBERS, "BFloat16Storage"}:
        raise ValueError(f"its tensors are stored as {name}")
    if any(part is not None for part in view):
        raise ValueError("a storage is a part of another one")
    return Stored(name, key)


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return {name: array} of a file that `torch.save(module.state_dict(), path)` wrote.

    The arrays may also be an entry of a dictionary, such as "state_dict". Raises UserError if the
    file cannot be read, is damaged or has no table of tensors.
    """
    try:
        check_regular(os.stat(path))
        with open(path, "rb") as file:
            if file.read(2) == b"PK":
                value, storages = _read_archive(file)
            else:  # reading from a map allocates no more than the file has
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    value, storages = _read_stream(content)
        table = _table(value)
        if sum(map(_nbytes, table.values())) > MOST_COPIES * os.path.getsize(path):
            raise ValueError("its tensors are much larger than the file")
        return {name: _array(tensor, storages) for name, tensor in table.items()}
    except OSError as error:
        raise unreadable(path, error) from None
    except DAMAGES as error:
        text = str(error) or type(error).__name__
        raise UserError(
            f"{printable(path)}: not a file with the tensors of a PyTorch module: {text:.200}"
        ) from None


def _read_archive(file):
    """Read the pickle of a zip archive; return its value and {key: bytes of the storage}."""
    content = zipfile.ZipFile(file)
    members = content.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("its members are compressed")
    size = os.fstat(file.fileno()).st_size
    if sum(max(member.file_size, member.compress_size) for member in members) > size:
        raise ValueError("its members are larger than the file")
    names = [member.filename for member in members]
    pickles = [name for name in names if name.endswith("/data.pkl")]
    if not pickles:
        raise ValueError("the archive has no data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in names and content.read(f"{folder}byteorder") != b"little":
        raise ValueError("its numbers are not little-endian")
    data = f"{folder}data/"
    storages = {n.removeprefix(data): content.read(n) for n in names if n.startswith(data)}
    return _Machine().run(io.BytesIO(content.read(pickles[0]))), storages


def _read_stream(file):
    """Read the older format; return the value of the pickle and {key: bytes of the storage}."""
    if _Machine().run(file) != MAGIC:
        raise ValueError("it does not begin as PyTorch's files do")
    for _ in range(2):  # the version of the format, and facts about the computer
        _Machine().run(file)
    machine = _Machine()
    value, keys = machine.run(file), _Machine().run(file)
    storages = {}
    for key in keys:
        (count,) = struct.unpack("<q", file.read(8))
        storages[key] = file.read(max(0, count) * _type_of(machine.storages[key]).itemsize)
    return value, storages


def _type_of(storage):
    return BF16 if storage.kind == "BFloat16Storage" else np.dtype(NUMBERS[storage.kind])


def _table(value):
    """Return the dictionary {name: Tensor} in the value of a file."""
    for name in TABLES:
        if isinstance(value, dict) and isinstance(value.get(name), dict):
            value = value[name]
    table = {n: t for n, t in value.items() if isinstance(t, Tensor)} if _is_table(value) else {}
    if not table:
        raise ValueError("it has no dictionary of tensors (state_dict)")
    prefix = "module."  # of DistributedDataParallel
    if all(name.startswith(prefix) for name in table):
        table = {name.removeprefix(prefix): tensor for name, tensor in table.items()}
    return table


def _is_table(value):
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _nbytes(tensor):
    return max(4, _type_of(tensor.storage).itemsize) * math.prod(tensor.shape)


def _array(tensor, storages):
    """Return a tensor as a contiguous array; bfloat16 numbers become float32."""
    kind, data = _type_of(tensor.storage), storages[tensor.storage.key]
    numbers = np.frombuffer(data, kind if kind != BF16 else "<u2")
    count = math.prod(tensor.shape)
    steps = list(zip(tensor.shape, tensor.strides, strict=True))
    last = tensor.offset + sum((n - 1) * stride for n, stride in steps)
    if min((tensor.offset, *tensor.shape, *tensor.strides)) < 0 or count > len(numbers):
        raise ValueError("a tensor has an impossible shape")
    if count and last >= len(numbers):
        raise ValueError("a tensor ends after its storage")
    if count == 0:
        return np.zeros(tensor.shape, np.float32)
    strides = [stride * numbers.itemsize for stride in tensor.strides]
    view = np.lib.stride_tricks.as_strided(numbers[tensor.offset :], tensor.shape, strides)
    if kind == BF16:
        return (view.astype(np.uint32) << 16).view(np.float32)
    return np.array(view, order="C")
