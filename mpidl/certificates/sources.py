"""The software and the arithmetic of a run."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpidl import numerics
from mpidl.backends.cpu import builds

if TYPE_CHECKING:
    from mpidl.ranks.world import World

PACKAGE_SUFFIXES = (".py", ".pyi")
# Sources of kernels that an installed package has, too. A library contains the hash of all sources
# that it was compiled from; `arithmetic` has it.
KERNEL_SUFFIXES = (".h", ".cu", ".cuh")
KERNEL_FOLDERS = ("", "cuda")


def software() -> dict[str, Any]:
    """Return the entry `software` of a start: version, numerics, and the hash of the sources."""
    origin = numerics.current()
    versions = {"mpidl": origin["mpidl_version"], "numerics": origin["numerics"]}
    return {**versions, "sources": sources_sha256()}


@functools.cache
def sources_sha256() -> str:
    """Return the SHA-256 over the sources of the package and of the kernels.

    For each file, sorted by its name, the path, the size and the content are hashed. An installed
    package has the same hash as the checkout that it was made from.
    """
    total = hashlib.sha256()
    for name, path in sorted(_sources()):
        with open(path, "rb") as file:
            content = file.read()
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def _sources() -> Iterator[tuple[str, str]]:
    """Yield (name, path) of each source, such as "mpidl/train.py"."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    kernels = builds.kernels_folder()
    for folder, inner_folders, files in os.walk(package):
        omitted = {"__pycache__"} | ({"kernels"} if folder == package else set())
        inner_folders[:] = [name for name in inner_folders if name not in omitted]
        for file in files:
            if file.endswith(PACKAGE_SUFFIXES):
                path = os.path.join(folder, file)
                yield "mpidl/" + os.path.relpath(path, package).replace(os.sep, "/"), path
    for inner in KERNEL_FOLDERS if kernels is not None else ():
        folder = os.path.join(kernels or "", inner)
        for file in os.listdir(folder) if os.path.isdir(folder) else ():
            if file.endswith(KERNEL_SUFFIXES):
                yield "/".join(filter(None, ("kernels", inner, file))), os.path.join(folder, file)


def arithmetic(world: World) -> dict[str, str | None]:
    """Return the entry `arithmetic` of a start: what this rank computes with."""
    library = builds.kernels()
    return {
        "device": "cpu" if world.device is None else world.device.name,
        "kernels": builds.running(),
        "kernel_sources": None if library is None else library.provenance["sources"],
    }
