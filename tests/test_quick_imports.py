"""Test the imports of a command: how often they access the file system, and what they import."""

import importlib
import os
import sys
from types import SimpleNamespace

import pytest

from mpidl import quick_imports
from mpidl.quick_imports import QuickImports

TRAIN = ["--epochs", "2"]


@pytest.mark.parametrize(
    ("words", "argv", "expected"),
    [
        (["python", "-m", "mpidl.train", *TRAIN], ["-m", *TRAIN], "train"),
        (["python", "-I", "-Wignore", "-mmpidl.train", *TRAIN], ["-m", *TRAIN], "train"),
        (["python", "-m", "mpidl", "sweep", "a.toml"], ["-m", "sweep", "a.toml"], "sweep"),
        (["python", "-m", "mpidl"], ["-m"], None),
        (["python", "-m", "pytest", "mpidl.train"], ["-m", "mpidl.train"], None),
        (["python", "-m", "mpidlx.train"], ["-m"], None),
        (["python", "mine.py", "-m", "mpidl.train"], ["mine.py", "-m", "mpidl.train"], None),
        (["python", "-c", "import mpidl", "-m"], ["-c", "-m"], None),
        (["python"], [""], None),
    ],
)
def test_the_command_of_a_process(monkeypatch, words, argv, expected):
    """The command is recognized although sys.argv[0] is "-m" during `python -m mpidl.train`."""
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", argv)
    assert quick_imports.command() == expected


def test_the_command_of_the_program_mpidl(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpidl_command", SimpleNamespace(command="train"))
    assert quick_imports.command() == "train"


@pytest.fixture
def usual_imports():
    """Restore the usual imports after the test."""
    yield
    quick_imports.end()
    quick_imports._is_command = False


@pytest.fixture
def paths_asked(usual_imports, monkeypatch):
    """The paths whose status imports ask for, from now on."""
    paths = []

    def ask(path):
        paths.append(path)
        return os.stat(path)

    monkeypatch.setattr(quick_imports, "_usual", (ask, *quick_imports._usual[1:]))
    monkeypatch.setattr(quick_imports._importer, "_path_stat", ask)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return paths


def test_imports_ask_once_for_the_status_of_a_path(monkeypatch, paths_asked, tmp_path):

    (tmp_path / "mpidl_imported_here.py").write_text("VALUE = 7\n")
    (tmp_path / "mpidl_imported_next.py").write_text("VALUE = 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(quick_imports, "command", lambda: "info")
    quick_imports.begin()
    assert importlib.import_module("mpidl_imported_here").VALUE == 7
    assert importlib.import_module("mpidl_imported_next").VALUE == 8
    paths = [tmp_path, tmp_path / "mpidl_imported_here.py", tmp_path / "mpidl_imported_next.py"]
    assert [paths_asked.count(str(path)) for path in paths] == [1, 1, 1]
    quick_imports.end()
    assert quick_imports._parts() == quick_imports._usual


def test_a_package_that_is_imported_later_takes_few_calls(monkeypatch, paths_asked, tmp_path):
    names = [f"mpidl_later_{number}" for number in range(4)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("VALUE = 12\n")
    monkeypatch.syspath_prepend(tmp_path)
    counts = []
    for is_command in (True, False):
        monkeypatch.setattr(quick_imports, "_is_command", is_command)
        paths_asked.clear()
        with QuickImports():
            for _ in range(2):
                assert importlib.import_module(names.pop()).VALUE == 12
        counts.append(paths_asked.count(str(tmp_path)))
        assert quick_imports._parts() == quick_imports._usual
    assert counts == [1, 2]


def test_imports_of_packages_do_not_search_for_extension_modules(
    monkeypatch, paths_asked, tmp_path
):
    """Only files that exist are requested, and a folder is listed once."""
    folders_listed, list_folder = [], os.listdir

    def list_once(folder):
        folders_listed.append(folder)
        return list_folder(folder)

    inner = tmp_path / "mpidl_package" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "mpidl_package" / "__init__.py").write_text("from mpidl_package import inner\n")
    (inner / "__init__.py").write_text("from mpidl_package.inner import last\n")
    (inner / "last.py").write_text("VALUE = 9\n")
    (tmp_path / "mpidl_namespace").mkdir()
    (tmp_path / "mpidl_namespace" / "part.py").write_text("VALUE = 10\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(quick_imports.os, "listdir", list_once)
    monkeypatch.setattr(quick_imports, "command", lambda: "info")
    quick_imports.begin()
    assert importlib.import_module("mpidl_package").inner.last.VALUE == 9
    assert importlib.import_module("mpidl_namespace.part").VALUE == 10
    local_paths = [path for path in paths_asked if path.startswith(str(tmp_path))]
    assert [path for path in local_paths if not os.path.exists(path)] == []
    assert len(local_paths) == len(set(local_paths))
    assert folders_listed.count(str(inner)) == folders_listed.count(str(inner.parent)) == 1


def test_a_package_in_a_folder_that_cannot_be_listed(monkeypatch, usual_imports, tmp_path):
    (tmp_path / "mpidl_unlisted").mkdir()
    (tmp_path / "mpidl_unlisted" / "__init__.py").write_text("VALUE = 11\n")
    monkeypatch.syspath_prepend(tmp_path)
    list_folder = os.listdir

    def refuse(folder):
        if str(folder).endswith("mpidl_unlisted"):
            raise PermissionError(folder)
        return list_folder(folder)

    monkeypatch.setattr(quick_imports.os, "listdir", refuse)
    monkeypatch.setattr(quick_imports, "command", lambda: "info")
    quick_imports.begin()
    assert importlib.import_module("mpidl_unlisted").VALUE == 11


@pytest.mark.parametrize("is_command", [False, True])
def test_changes_of_other_packages_stay(monkeypatch, usual_imports, is_command):
    """Another package may replace a part of Python's imports after mpidl is imported."""
    monkeypatch.setattr(quick_imports, "_is_command", is_command)
    loader = quick_imports._importer.FileLoader
    usual = loader.get_data

    def other(self, path):
        return usual(self, path)

    with QuickImports():
        monkeypatch.setattr(loader, "get_data", other)
    assert loader.get_data is other
    if not is_command:
        with QuickImports():
            pass
        assert loader.get_data is other
