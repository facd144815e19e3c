"""Test that `mpidl NAME` is the same as `python -m mpidl.NAME`.

`mpidl` without a command must list the commands without importing NumPy.
"""

import configparser
import os
import re
import signal
import socket
import subprocess
import sys

import jobs
import launcher
import pytest

import mpidl_command
from mpidl.errors import UserError

LIST = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code
print("loaded:", *sorted({"numpy", "mpi4py", "rich"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Return the path of a program like the program that pip writes for setup.cfg's entry point."""
    config = configparser.ConfigParser()
    config.read(launcher.ROOT / "setup.cfg")
    name, _, target = config["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    path = tmp_path_factory.mktemp("bin") / name
    path.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return path


def test_the_list_of_commands_loads_no_numpy(script):
    result = launcher.mpirun(None, "-c", LIST, script, check=0)
    assert result.stderr == "" and result.stdout.endswith("\nloaded:\n")
    package = launcher.ROOT / "mpidl"
    modules = [*package.glob("*.py"), package / "report" / "__main__.py"]
    names = {
        path.parent.name if path.stem == "__main__" else path.stem
        for path in modules
        if re.search(r"failure\.run\(main\)|    run\(", path.read_text())
    }
    assert set(mpidl_command.commands()) == names
    assert re.findall(r"\n  ([a-z]+)  ", result.stdout) == list(mpidl_command.commands())
    assert "  Train a network\n" in result.stdout
    result = launcher.mpirun(None, "-c", LIST, script, "--version", check=0)
    assert re.fullmatch(r"mpidl \d+\.\d+\.\d+\nloaded:\n", result.stdout)


def pipe_without_reader():
    read, write = os.pipe()
    os.close(read)
    return write


def socket_without_reader():
    first, second = socket.socketpair()
    second.close()
    return first.detach()


@pytest.mark.parametrize("open_output", [pipe_without_reader, socket_without_reader])
def test_a_reader_that_has_ended_is_no_error(script, open_output):
    """A list of names may go to `head`, which reads a part of it."""
    command = [sys.executable, script, "completion", "bash"]
    with os.fdopen(open_output(), "wb") as output:
        result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_closed_stdout_is_no_error(script):
    """A daemon may start a command without a stdout. Then Python's sys.stdout is None."""
    command = ["bash", "-c", '"$@" >&-', "-", sys.executable, script, "completion", "bash"]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_unknown_word_is_one_line(script):
    line = jobs.refusal(launcher.mpirun(None, script, "tran", "--epochs", 3))
    assert line == "unknown command tran: did you mean train?"
    with pytest.raises(UserError, match="^unknown option --vers: did you mean --version[?]$"):
        mpidl_command._refuse("--vers")
    with pytest.raises(UserError, match=r"^unknown command x \(mpidl lists the commands\)$"):
        mpidl_command._refuse("x")


def test_a_working_directory_that_was_removed(monkeypatch):
    def getcwd():
        raise FileNotFoundError("No such file or directory")

    monkeypatch.setattr(mpidl_command.os, "getcwd", getcwd)
    monkeypatch.setattr(sys, "path", ["script's folder", *sys.path])
    mpidl_command._import_from_the_working_directory()
    assert sys.path[0] == ""


def words_of_a_training(script, pictures, folder, *options):
    """Return the arguments for a training run with a network file that imports another file."""
    networks = launcher.ROOT / "tests" / "launch" / "networks.py"
    (folder / "mine.py").write_text("from beside import small\n")
    (folder / "beside.py").write_text(networks.read_text())
    words = ["--batch-size", 50, "--network", "mine.py:small", "--data", pictures, "--out", "run"]
    return [script, "train", *words, *options]


@pytest.mark.slow("jobs")
def test_a_training_has_the_weights_of_the_module(script, pictures, tmp_path):
    short = ["--max-iterations", 2, "--threads", 1]
    words = words_of_a_training(script, pictures, tmp_path, *short)
    launcher.mpirun(2, *words, env=jobs.without_plots(), cwd=tmp_path, check=0)
    expected = jobs.trained_hash(1, pictures, tmp_path / "module", *short)
    assert jobs.weights_hash(tmp_path / "run") == expected


@pytest.mark.slow("jobs")
def test_signals_and_errors_are_those_of_the_module(script, pictures, tmp_path):
    words = words_of_a_training(script, pictures, tmp_path, *jobs.ENDLESS)
    with launcher.start(2, *words, env=jobs.without_plots(), cwd=tmp_path) as job:
        next(line for line in job.stdout if line.startswith("Epoch: 2,"))
        os.kill(job.rank_pids()[1], signal.SIGUSR1)
        result = launcher.finish(job)
    assert result.returncode == jobs.STOPPED, result.stderr
    text = r"SIGUSR1: stopped at iteration \d+, checkpoint written"
    assert re.match(text, result.stdout.splitlines()[-1])
    line = jobs.refusal(launcher.mpirun(2, script, "train", "--epoch", 3))
    assert line == "unknown option --epoch: did you mean --epochs?"
    line = jobs.refusal(launcher.mpirun(2, script, "tran"))
    assert line == "unknown command tran: did you mean train?"
