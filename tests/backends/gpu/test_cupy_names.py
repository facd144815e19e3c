"""Check that every CuPy name that mpidl uses exists and accepts mpidl's number of arguments."""

import ast
import importlib
import re
import warnings
from pathlib import Path

import pytest

from mpidl.backends import discovery
from mpidl.backends.gpu import cuda_device
from mpidl.comm import nccl

SOURCES = [Path(module.__file__) for module in (cuda_device, discovery, nccl)]
MODULES = ("runtime", "driver", "memory_hook", "nccl")


def used_names(source):
    """Return the CuPy functions in a source: {(module, name): [number of arguments per call]}."""
    calls = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner in MODULES:
                calls.setdefault((owner, node.attr), [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            key = ast.unparse(node.func.value).rpartition(".")[2], node.func.attr
            starred = any(isinstance(a, ast.Starred) for a in node.args)
            if key in calls and not starred:
                calls[key].append(len(node.args) + len(node.keywords))
    return calls


def imported_names(source):
    """Return the names that a source imports from cupy."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cupy"):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name.startswith("cupy")]
    return names


@pytest.fixture(scope="module")
def cupy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("cupy", reason="CuPy is not installed")


def problems(cupy, source):
    """Return the names in a source that CuPy lacks, or that do not accept the arguments."""
    errors = []
    for name in imported_names(source):
        parent, _, last = name.rpartition(".")
        if parent and not hasattr(importlib.import_module(parent), last):
            try:
                importlib.import_module(name)  # a submodule that the package does not import
            except ImportError:
                errors.append(name)
    for (module, name), calls in used_names(source).items():
        if module == "nccl":  # this module can be imported only if NCCL's library is installed
            continue
        value = getattr(getattr(cupy.cuda, module), name, None)
        if value is None:
            errors.append(f"{module}.{name}")
        declared = re.match(rf"{name}\((.*?)\)", getattr(value, "__doc__", None) or "")
        if declared and calls:
            words = [word for word in declared[1].split(",") if word.strip()]
            low, high = len([word for word in words if "=" not in word]), len(words)
            errors += [f"{module}.{name} of {n} arguments" for n in calls if not low <= n <= high]
    return errors


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_name_of_cupy_exists(cupy, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NCCL's library may be missing
        assert problems(cupy, path.read_text()) == []


def test_negative_control_wrong_names_are_reported(cupy):
    names = used_names(SOURCES[0].read_text())
    assert {("runtime", "malloc"), ("driver", "launchKernel")} <= set(names)
    assert names["runtime", "memcpyAsync"] == [5, 5]
    source = "def f(self):\n    self.runtime.mallocNow(3)\n    runtime.malloc(3, 4)\n"
    assert problems(cupy, source) == ["runtime.mallocNow", "runtime.malloc of 2 arguments"]
    assert problems(cupy, "from cupy.cuda import nothing\n") == ["cupy.cuda.nothing"]


def test_every_name_of_nccl_exists(cupy):
    """Search the file of CuPy's NCCL module, which cannot be imported without NCCL's library."""
    (path,) = Path(cupy.__file__).parents[1].glob("cupy_backends/cuda/libs/nccl.*.so")
    content = path.read_bytes()
    names = [name for module, name in used_names(SOURCES[2].read_text()) if module == "nccl"]
    assert {"NcclCommunicator", "get_unique_id", "NCCL_INT8"} <= set(names)
    for name in {*names, "allGather", "send", "recv"} - {"available"}:
        assert name.encode() in content, name
