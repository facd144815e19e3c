"""Test functions and modules that a command loads from the user's files."""

import pickle
import sys

from image_sets import refusal

from mpidl.cli import user_files


def test_each_user_file_is_a_separate_module(tmp_path):
    """Files with the same name in two folders are two modules, and pickle finds their classes."""
    modules = []
    for folder in ("a", "b-1"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "layers.py"
        path.write_text(f"class Layer:\n    folder = {folder!r}\n")
        modules.append(user_files.load_user_file(path))
    first, second = modules
    assert (first.Layer.folder, second.Layer.folder) == ("a", "b-1")
    for module in modules:
        assert sys.modules[module.__name__] is module
        assert pickle.loads(pickle.dumps(module.Layer)) is module.Layer


def test_user_files_that_cannot_be_loaded(tmp_path):
    modules = set(sys.modules)
    (tmp_path / "text.txt").write_text("")
    for name, text in (
        ("none.py", "no such file: "),
        ("text.txt", "expected a Python file, FILE.py, "),
    ):
        assert text in refusal(user_files.load_user_file, tmp_path / name)
    broken = tmp_path / "broken.py"
    broken.write_text("import mpidl\n\nraise mpidl.UserError('its own')\n")
    assert refusal(user_files.load_user_file, broken) == "its own"
    text = refusal(user_files.load_user_function, f"{broken}:make", "--optimizer")
    assert text == f"--optimizer {broken}:make: its own"
    assert set(sys.modules) == modules


def test_user_functions(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def make(rate):\n    return 2 * rate\n")
    assert user_files.load_user_function(f"{path}:make", "--optimizer")(0.25) == 0.5
    text = refusal(user_files.load_user_function, f"{path}:mak", "--optimizer")
    problem = f"{path} defines no function mak: did you mean make?"
    assert text == f"--optimizer {path}:mak: {problem}"
