"""Test `mpidl verify --golden`, and that the command `train` computes the hashes of the table."""

import shlex

import jobs
import launcher
import pool
import pytest
from cpu_builds import needs_kernels

from mpidl.cli import verify
from mpidl.errors import UserError
from mpidl.training import golden

TRAININGS = {training.name: training for training in golden.table().trainings}


@needs_kernels
def test_a_different_hash_is_reported(monkeypatch, capsys):
    digits, adam = TRAININGS["digits"], TRAININGS["adam"]
    kind, zeros = golden.arithmetic(), "0" * 64
    table = golden.table()._replace(trainings=[digits, adam])
    monkeypatch.setattr(golden, "table", lambda: table)
    assert verify.main(["--golden"]) == 0
    head, *rows, end = capsys.readouterr().out.splitlines()
    assert head == f"numerics {table.numerics}, arithmetic {kind}, 2 trainings"
    assert rows == ["  1 rank  digits  equal", "  1 rank  adam    equal"]
    assert end == "this machine computes the weights of the table, byte for byte"
    table.trainings[1] = adam._replace(hashes={kind: zeros})
    assert verify.main(["--golden"]) == 1
    _, equal, different, end = capsys.readouterr().out.splitlines()
    assert equal == "  1 rank  digits  equal"
    line = f"  1 rank  adam    DIFFERENT: expected {zeros}, found {adam.hashes[kind]}"
    assert different == line and end.startswith("DIFFERENT: 1 of 2 trainings")


def test_refusals():
    with pytest.raises(UserError, match="^--seed: expected no --golden with it"):
        verify.main(["--golden", "--seed", "2"])
    with pytest.raises(UserError, match="^--golden: expected no RUN with it, found runs/a$"):
        verify.main(["runs/a", "--golden"])
    line = jobs.refusal(pool.run(2, "-m", "mpidl.verify", "--golden", check=2))
    assert line.startswith("verify starts the ranks itself: run it without mpirun")
    env = {"MPIDL_CPU": "numpy"}
    result = launcher.mpirun(None, "-m", "mpidl.verify", "--golden", env=env, check=2)
    assert jobs.refusal(result).endswith("found NumPy, whose weights depend on its BLAS")


@needs_kernels
@pytest.mark.slow("ranks")
@pytest.mark.timeout(300)
def test_the_same_hashes_on_other_ranks():
    words = ["-m", "mpidl.verify", "--golden", "--ranks", "2,3"]
    lines = launcher.mpirun(None, *words, check=0).stdout.splitlines()
    for ranks in 2, 3:
        rows = [line for line in lines if line.startswith(f" {ranks} ranks  ")]
        assert len(rows) == len(TRAININGS) and all(row.endswith("  equal") for row in rows)


ONLY_IN_THE_TABLE = [*golden.SETS, *golden.NETWORKS]


def runs_of_the_command():
    """Return the names of trainings that the command can run; only the first one is quick."""
    names = [n for n, t in TRAININGS.items() if not {*t.arguments.split()} & {*ONLY_IN_THE_TABLE}]
    names.sort(key=lambda name: name != "colours and cutmix")
    return names[:1] + [pytest.param(name, marks=pytest.mark.slow("ranks")) for name in names[1:]]


@needs_kernels
@pytest.mark.parametrize("name", runs_of_the_command())
def test_the_command_trains_the_same_weights(name, tmp_path):
    words, out = shlex.split(TRAININGS[name].arguments), tmp_path / "run"
    pool.run(2, "-m", "mpidl.train", *words, "--out", out, check=0)
    assert jobs.weights_hash(out) == TRAININGS[name].hashes[golden.arithmetic()]
