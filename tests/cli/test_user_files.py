"""Test functions and modules that a command loads from the user's files."""

import hashlib
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


def test_which_python_file_a_checkpoint_may_name(tmp_path):
    """Only a file outside the run's folder, with the content that the run used."""
    run, path = tmp_path / "run", tmp_path / "net.py"
    (run / "code").mkdir(parents=True)
    path.write_text("def layers(shape, classes): ...\n")
    network = f"{path}:layers"
    facts = {"network_file": user_files.network_file(network)}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts["network_file"] == {"path": str(path), "sha256": digest}
    user_files.check_resumed(network, facts, run)
    for name in ("digits", None, "none"):
        user_files.check_resumed(name, {}, run)
        assert user_files.network_file(name) is None

    def problem(name, facts, folder=run):
        text = refusal(user_files.check_resumed, f"{name}:layers", facts, folder)
        start = f"--resume {folder}: the checkpoint names Python code: "
        end = f"; if you trust the file, repeat --network {name}:layers"
        assert text.startswith(start) and text.endswith(end)
        return text.removeprefix(start).removesuffix(end)

    for damaged in (None, [], "text", {}, {"sha256": 3}):
        text = problem(path, {"network_file": damaged})
        assert text == f"expected a checkpoint with the sha256 of {path}, found none"
    assert problem(path, {}) == text
    other = tmp_path / "run-2" / "net.py"  # its path starts like the path of the folder
    other.parent.mkdir()
    other.write_bytes(path.read_bytes())
    user_files.check_resumed(f"{other}:layers", facts, run)
    inside, link = run / "code" / "net.py", tmp_path / "link.py"
    inside.write_bytes(path.read_bytes())
    link.symlink_to(inside)
    for name in (inside, link, run / "code" / ".." / "code" / "net.py"):
        outside = f"expected a Python file outside the folder, found {name} in it"
        assert problem(name, facts) == outside
    linked = tmp_path / "linked"
    linked.symlink_to(run)
    assert "outside the folder" in problem(inside, facts, linked)
    path.write_text("def layers(shape, classes): return []\n")
    now = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    changed = f"expected {path} with sha256 {digest[:12]}, as in the run, found {now}"
    assert problem(path, facts) == changed
    path.unlink()
    assert problem(path, facts) == f"expected {path} with sha256 {digest[:12]}, found no such file"
