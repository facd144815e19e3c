"""Test the imports of a command: how often they access the file system, and what they import."""

import importlib
import importlib.machinery
import importlib.util
import os
import sys

import pytest

from mpidl import listed_folders


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder of installed packages, which is on the path. The usual imports are restored."""
    for attribute in ("path_hooks", "path", "meta_path"):
        monkeypatch.setattr(sys, attribute, list(getattr(sys, attribute)))
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(packages)
    listed_folders._installed.cache_clear()
    listed_folders._names_in.cache_clear()
    before = set(sys.modules)
    yield packages
    listed_folders._installed.cache_clear()
    listed_folders._names_in.cache_clear()
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def paths(monkeypatch):
    """The paths whose status or list the imports ask for, from now on."""
    paths = []

    def noting(ask):
        def answer(path=".", *options, **keywords):
            paths.append(str(path))
            return ask(path, *options, **keywords)

        return answer

    external = importlib.machinery.SourceFileLoader.get_data.__globals__
    monkeypatch.setitem(external, "_path_stat", noting(external["_path_stat"]))
    monkeypatch.setattr(listed_folders.os, "listdir", noting(os.listdir))
    return paths


def write_package(folder):
    inner = folder / "mpidl_package" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("from mpidl_package import inner\n")
    (inner / "__init__.py").write_text("from mpidl_package.inner import last\n")
    (inner / "last.py").write_text("VALUE = 9\n")
    (folder / "mpidl_module.py").write_text("VALUE = 7\n")


def test_imports_ask_once_for_a_list_and_for_the_status_of_a_file(folder, paths):
    write_package(folder)
    listed_folders.begin()
    assert importlib.import_module("mpidl_package").inner.last.VALUE == 9
    assert importlib.import_module("mpidl_module").VALUE == 7
    below = [path for path in paths if path.startswith(str(folder))]
    assert [path for path in below if not os.path.exists(path)] == []
    assert len(below) == len(set(below)) == 7  # three folders and four files


def test_usual_imports_ask_more_often(folder, paths):
    """Negative control of the test above."""
    write_package(folder)
    assert importlib.import_module("mpidl_package").inner.last.VALUE == 9
    assert importlib.import_module("mpidl_module").VALUE == 7
    assert len([path for path in paths if path.startswith(str(folder))]) > 20


def test_modules_of_all_kinds(folder):
    """A namespace package, an extension module that hides Python code, and bytecode alone."""
    (folder / "mpidl_namespace").mkdir()
    (folder / "mpidl_namespace" / "part.py").write_text("VALUE = 10\n")
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    for name in (f"mpidl_extension{suffix}", "mpidl_extension.py", "mpidl_bytecode.pyc"):
        (folder / name).write_bytes(b"")
    listed_folders.begin()
    assert importlib.import_module("mpidl_namespace.part").VALUE == 10
    assert importlib.util.find_spec("mpidl_extension").origin.endswith(suffix)
    loader = importlib.util.find_spec("mpidl_bytecode").loader
    assert isinstance(loader, importlib.machinery.SourcelessFileLoader)
    with pytest.raises(ModuleNotFoundError, match="mpidl_missing"):
        importlib.import_module("mpidl_missing")


def test_a_package_in_a_folder_that_cannot_be_listed(monkeypatch, folder):
    (folder / "mpidl_unlisted").mkdir()
    (folder / "mpidl_unlisted" / "__init__.py").write_text("VALUE = 11\n")
    list_folder = os.listdir

    def refuse(path):
        if str(path).endswith("mpidl_unlisted"):
            raise PermissionError(path)
        return list_folder(path)

    monkeypatch.setattr(listed_folders.os, "listdir", refuse)
    listed_folders.begin()
    assert importlib.import_module("mpidl_unlisted").VALUE == 11


def test_a_new_file_in_a_folder_of_the_user_is_found(monkeypatch, folder, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    listed_folders.begin()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mpidl_new")
    (tmp_path / "mpidl_new.py").write_text("VALUE = 12\n")
    importlib.invalidate_caches()
    assert importlib.import_module("mpidl_new").VALUE == 12
