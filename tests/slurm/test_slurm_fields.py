"""Test how run/slurm.sh fills fields in the arguments of job scripts, without Slurm."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "run" / "slurm.sh"
ARRAY = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
JOB = {"SLURM_JOB_ID": "73", "SLURM_JOB_NODELIST": "n1", "PATH": "/usr/bin:/bin"}


def run(tmp_path, words, **variables):
    """Source the script with arguments; return the exit code, new arguments and log."""
    (tmp_path / "mpidl-mpi").write_text("none\n")
    command = f'set -u; asked="" script=a venv={tmp_path}; . {SCRIPT}; printf "%s\\0" "$@" >&2'
    result = subprocess.run(
        ["bash", "-c", command, "train.slurm", *words],
        env={**JOB, **variables},
        capture_output=True,
        timeout=60,
        text=True,
    )
    return result.returncode, result.stderr.split("\0")[:-1], result.stdout


@pytest.mark.parametrize(
    "word, expected",
    [
        ("runs/%a", "runs/3"),
        ("--out=%A_%a-%j", "--out=70_3-73"),
        ("%a5%A0", "35700"),  # in a path, digits may follow a field
        ("100%%/%%a%", "100%/%a%"),
        ("%d%", "%d%"),
        ("https://host/a%20b%A3%ab?x=%2F%2f", "https://host/a%20b%A3%ab?x=%2F%2f"),
        ("--data=s3://bucket/%a/%A_%C3%A9.h5", "--data=s3://bucket/3/70_%C3%A9.h5"),
        ("s3://bucket/%%41/%j", "s3://bucket/%41/73"),
        ("two words\nand a line %a", "two words\nand a line 3"),
        ("", ""),
        ("%", "%"),
    ],
)
def test_fields_are_filled_outside_of_encoded_characters(tmp_path, word, expected):
    assert run(tmp_path, ["--seed", word], **ARRAY)[:2] == (0, ["--seed", expected])


def test_fields_of_an_array_need_one(tmp_path):
    url = "https://host/%A3%AF"
    assert run(tmp_path, [url])[:2] == (0, [url])
    for word in ("runs/%a", "s3://bucket/%A/x"):
        code, words, log = run(tmp_path, [word])
        assert code == 2 and not words
        assert f"{word}: expected a job array for %A and %a (sbatch --array=0-3)" in log
