"""Import the modules of a command with few file-system calls.

For each module, Python asks a folder for its status, for one or more files that the module may be
in, and opens the bytecode. If thousands of ranks start at the same time, these calls slow a
parallel file system. In a command, the folders of installed packages are listed once instead. They
do not change while the command runs. Other folders are listed at most once per second. In other
programs, this module changes nothing.
"""

import functools
import math
import os
import sys
import time
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import spec_from_file_location
from types import ModuleType

LOOK_SECONDS = 1.0  # shortest time between two lists of a folder that may change


def begin() -> None:
    """Find modules by lists of their folders, from now on."""
    sys.path_hooks[:0] = [ListedFolder, UserFolder]
    sys.path_importer_cache.clear()


def _list(folder: str) -> frozenset[str]:
    """Return the names in a folder, or none if the folder cannot be listed."""
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


_names_in = functools.cache(_list)  # of a folder that does not change


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the folders of Python's library, of the packages on the path, and of mpidl."""
    packages = [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")]
    return os.path.dirname(os.__file__), os.path.dirname(os.path.abspath(__file__)), *packages


class QuickLoader(SourceFileLoader):
    """Loads a module of Python code, and reads its bytecode without asking for its size."""

    def get_data(self, path: str) -> bytes:
        """Return the bytes of a file."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return b"".join(iter(lambda: os.read(descriptor, 1 << 20), b""))
        finally:
            os.close(descriptor)


LOADERS = (  # in Python's order
    *((ExtensionFileLoader, suffix) for suffix in EXTENSION_SUFFIXES),
    *((QuickLoader, suffix) for suffix in SOURCE_SUFFIXES),
    *((SourcelessFileLoader, suffix) for suffix in BYTECODE_SUFFIXES),
)


class ListedFolder(FileFinder):
    """Finds the modules in the folder of an installed package; refuses other folders."""

    def __init__(self, path: str) -> None:
        is_installed = any(path == f or path.startswith(f + os.sep) for f in _installed())
        if not is_installed or path.endswith(tuple(SOURCE_SUFFIXES)):  # such as in runpy.run_path
            raise ImportError(f"not the folder of an installed package: {path}", path=path)
        super().__init__(path, *((loader, [suffix]) for loader, suffix in LOADERS))

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module by the list of the folder."""
        name, names = fullname.rpartition(".")[2], _names_in(self.path)
        folder = os.path.join(self.path, name)
        if name in names:
            if "__init__.py" not in _names_in(folder):
                return super().find_spec(fullname, target)  # such as a namespace package
            file = os.path.join(folder, "__init__.py")
            loader = QuickLoader(fullname, file)
            return spec_from_file_location(
                fullname, file, loader=loader, submodule_search_locations=[folder]
            )
        for loader_class, suffix in LOADERS:
            if name + suffix in names:
                file = folder + suffix
                return spec_from_file_location(fullname, file, loader=loader_class(fullname, file))
        return None


class UserFolder(FileFinder):
    """Finds modules in a folder that may change; looks for changes at most once per second."""

    names: frozenset[str]  # in the folder
    seconds: float  # time of the list

    def __init__(self, path: str) -> None:
        if not os.path.isdir(path):
            raise ImportError(f"not a folder: {path}", path=path)
        super().__init__(path, *((loader, [suffix]) for loader, suffix in LOADERS))
        self.invalidate_caches()

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module as Python does, if the list of the folder has its name."""
        if time.monotonic() - self.seconds > LOOK_SECONDS:
            self.names, self.seconds = _list(self.path), time.monotonic()
        name = fullname.rpartition(".")[2]
        if self.names.isdisjoint({name, *(name + suffix for _, suffix in LOADERS)}):
            return None
        return super().find_spec(fullname, target)

    def invalidate_caches(self) -> None:
        """List the folder before the next import."""
        super().invalidate_caches()
        self.names, self.seconds = frozenset(), -math.inf
