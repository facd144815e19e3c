"""Test that the printed scripts complete commands, options and values in real shells."""

import contextlib
import os
import pty
import shutil
import subprocess

import pytest

from mpidl.cli import completion
from mpidl.errors import UserError

BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_mpidl
echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """{shell: path of its completion script}."""
    folder = tmp_path_factory.mktemp("scripts")
    commands = completion.described_commands()
    for shell, script in completion.SHELLS.items():
        (folder / shell).write_text(script(commands))
    return {shell: folder / shell for shell in completion.SHELLS}


def need(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}: apt-get install {shell}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mpidl tra", "train"),
        ("mpidl help pre", "predict"),
        ("mpidl train --learning-r", "--learning-rate"),
        ("mpidl train --solver ad", "adam adamw"),
        ("mpidl train --solver = ad", "adam adamw"),  # bash splits --solver=ad into these words
        ("mpidl train --loss m", "mse mae"),
        ("mpidl train --data d", "digits documents"),
        ("mpidl pack d", "documents"),
        ("mpidl report d", "documents"),
        ("mpidl monitor documents d", "documents"),
        ("mpidl train --monitor --overw", "--overwrite"),  # the value of --monitor is optional
        ("mpidl train --epochs 1", ""),
        ("mpidl convert --names t", "torchvision timm transformers"),
        ("mpirun -n 4 /opt/bin/mpidl train --overw", "--overwrite"),
        ("mpirun -n 4 python tra", ""),
        ("mpidl unknown --he", ""),
    ],
)
def test_bash_completes(words, expected, scripts, tmp_path):
    need("bash")
    (tmp_path / "documents").mkdir()
    command = ["bash", "-c", BASH, "bash", scripts["bash"], *words.split()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (result.stdout.split(), result.stderr) == (expected.split(), "")


@pytest.mark.parametrize("word", ["my\\ d", '"my d', "'my d"])
def test_bash_quotes_the_names_of_files(word, scripts, tmp_path):
    """An interactive bash completes a file name with spaces and passes the name as one argument."""
    need("bash")
    (tmp_path / "my data.npz").touch()
    ours, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    environment = os.environ | {"TERM": "dumb", "INPUTRC": os.devnull, "PS1": "> "}
    command = ["bash", "--norc", "--noprofile", "-i"]
    options = {"cwd": tmp_path, "env": environment, "start_new_session": True}
    shell = subprocess.Popen(command, **options, **streams)
    os.close(terminal)
    lines = [f"source {scripts['bash']}", "mpidl() { printf '<%s>' \"$@\"; }"]
    lines += [f"mpidl train --data {word}\t", "exit", "\x04\x04"]
    os.write(ours, "\n".join(lines).encode())
    output = b""
    with contextlib.suppress(OSError):  # the shell has ended
        while text := os.read(ours, 4096):
            output += text
    shell.wait()
    os.close(ours)
    assert b"<train><--data><my data.npz>" in output, output.decode()


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_shells_accept_the_scripts(shell, scripts):
    need(shell)
    result = subprocess.run([shell, "-n", scripts[shell]], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    text = scripts[shell].read_text()
    for name in ("train", "sweep", "learn-rate-schedule", "rescale-zero-one"):
        assert name in text


def test_zsh_and_fish_complete_several_runs(scripts):
    assert scripts["zsh"].read_text().count("'*:RUN:_files'") == 2  # report and monitor
    for command in ("report", "monitor"):
        assert f"__fish_seen_subcommand_from {command}' -F\n" in scripts["fish"].read_text()


def test_fish_completes(scripts):
    need("fish")
    code = "source $argv[1]; complete -C $argv[2]"
    for words, expected in (("mpidl tra", "train"), ("mpidl train --solver adamw", "adamw")):
        command = ["fish", "-c", code, scripts["fish"], words]
        lines = subprocess.check_output(command, text=True).splitlines()
        assert [line.split("\t")[0] for line in lines] == [expected]


def test_the_command_prints_a_script(scripts, capsys):
    assert completion.main(["bash"]) == 0
    assert capsys.readouterr().out == scripts["bash"].read_text()
    with pytest.raises(UserError, match="SHELL: invalid choice: 'csh'"):
        completion.main(["csh"])
