"""Test the command `python -m mpidl.pack`, and training on the files that it writes."""

import os
import re
import signal
import time

import h5py
import jobs
import launcher
import numpy as np
import pool
import pytest
from image_sets import grow, pixels_of, save
from launcher import start
from limits import wait_until

from mpidl.data import PackedDatastore

ITERATIONS = ["--max-iterations", 4]


def pack(*words, check=0, **options):
    return pool.run(None, "-m", "mpidl.pack", *words, check=check, **options)


@pytest.fixture(scope="module")
def packed(pictures, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "shapes.h5"
    result = pack(pictures, path)
    lines = jobs.output_lines(result)
    assert lines[0] == f"From: {pictures}: 210 images of 1x12x12 in 3 classes"
    assert re.fullmatch(rf"Packed: {path}, 210 images, [\d,]+ bytes, in 0:00:\d\d", lines[1])
    assert jobs.error_lines(result) == [] and len(lines) == 2
    return path


@pytest.fixture(scope="module")
def expected_hash(pictures, tmp_path_factory):
    """Return the hash of the weights after training on the folder of images."""
    return jobs.trained_hash(1, pictures, tmp_path_factory.mktemp("folder"), *ITERATIONS)


@pytest.mark.slow("jobs")
def test_training_on_the_packed_file_gives_the_weights_of_the_folder(
    packed, expected_hash, tmp_path
):
    for ranks, seed in ((3, 0), (1, 1)):
        words = [*ITERATIONS, "--seed", seed]
        weights = jobs.trained_hash(ranks, packed, tmp_path / f"{ranks}-{seed}", *words)
        assert (weights == expected_hash) == (seed == 0)


def test_a_run_resumes_on_the_packed_file(pictures, packed, expected_hash, tmp_path):
    """A run on a folder can be resumed on the packed file, which has the same fingerprint."""
    jobs.train(1, pictures, tmp_path / "run", "--max-iterations", 2)
    jobs.resume(2, tmp_path / "run", *ITERATIONS, "--data", packed, "--out", tmp_path / "resumed")
    assert jobs.weights_hash(tmp_path / "resumed") == expected_hash


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow("jobs")),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow("jobs")),
    ],
)
def test_the_same_command_continues_after_a_signal(tmp_path, number):
    folder, target = tmp_path / "set", tmp_path / "x.h5"
    for name in ("a", "b"):  # 24 chunks of 4 MB
        save(folder / name / "0.png", pixels_of(0, 1, 2048, 2048), compress_level=0)
        for i in range(1, 12):
            os.link(folder / name / "0.png", folder / name / f"{i}.png")
    part = tmp_path / ".x.h5.part"
    with start(None, "-m", "mpidl.pack", folder, target, "--threads", 1) as job:
        wait_until(lambda: written(part))
        job.send_signal(number)
        result = launcher.finish(job)
    assert result.returncode == 75, result.stdout + result.stderr
    note = re.search(r"(SIG\w+): stopped after (\d+) of 24 images; to continue", result.stdout)
    assert note and note[1] == signal.Signals(number).name and int(note[2]) < 24
    assert not target.exists()
    before = written(part)
    result = pack(folder, target)
    assert before >= int(note[2]) > 0 and "Packed: " in result.stdout and not part.exists()
    store = PackedDatastore(target)
    store.verify()
    assert np.array_equal(store.read([20])[0], pixels_of(0, 1, 2048, 2048))


def written(part):
    """Return the number of chunks with checksums in an unfinished file."""
    try:
        with h5py.File(part, locking=False) as file:
            return int((file["train/checksums"][()] != 0).any(axis=1).sum())
    except (OSError, KeyError):
        return 0


@pytest.mark.slow("jobs")
def test_a_killed_packing_continues(tmp_path):
    grow(tmp_path / "set", per_class=40, shape=(3, 64, 64))
    with start(None, "-m", "mpidl.pack", tmp_path / "set", tmp_path / "x.h5") as job:
        while not (tmp_path / ".x.h5.part").exists():
            time.sleep(0.002)
        job.kill()
    if not (tmp_path / "x.h5").exists():
        pack(tmp_path / "set", tmp_path / "x.h5")
    pack(tmp_path / "x.h5", "--verify")
    assert len(PackedDatastore(tmp_path / "x.h5")) == 120


REFUSED = {
    "nothing to write": (["digits"], "DST.h5: expected the file to write, found none"),
    "size": (["digits", "x.h5", "--resize", "x"], "--resize must be HEIGHTxWIDTH such as 224x192"),
    "no folder": (["missing", "x.h5"], "SRC missing: no such folder"),
    "unknown option": (["a", "b", "--resise"], "unknown option --resise: did you mean --resize?"),
    "to verify": (["missing.h5", "--verify"], "missing.h5: no such file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, tmp_path):
    words, text = REFUSED[case]
    assert jobs.refusal(pack(*words, check=2, cwd=tmp_path)).startswith(text)
    assert os.listdir(tmp_path) == []


def test_pack_is_one_process(pictures, tmp_path):
    line = jobs.refusal(pool.run(2, "-m", "mpidl.pack", pictures, tmp_path / "x.h5"))
    assert line == "pack uses one process with threads: run it without mpirun"


def test_training_refuses_bad_data_in_one_line(packed, tmp_path):
    """A truncated packed file, NaN pixels and a single class are each a one-line error."""
    bad = tmp_path / "bad.h5"
    bad.write_bytes(packed.read_bytes()[:-100])
    with h5py.File(tmp_path / "nan.h5", "w") as file:
        file["images"] = np.full((64, 12, 12), np.nan, np.float32)
        file["labels"] = np.arange(64) % 3
    with h5py.File(tmp_path / "one.h5", "w") as file:
        file["images"] = pixels_of(0, 64, 12, 12)
        file["labels"] = np.zeros(64, int)
    expected = {
        bad: f"{bad}: the file cannot be read: ",
        tmp_path / "nan.h5": f"{tmp_path}/nan.h5: image ",
        tmp_path / "one.h5": "expected images of at least two classes",
    }
    for path, text in expected.items():
        result = jobs.train(2, path, tmp_path / "out", *ITERATIONS, check=2, network="digits")
        assert text in jobs.refusal(result)
