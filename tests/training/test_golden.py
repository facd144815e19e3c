"""Test that this mpidl computes the golden hashes, and that they belong to its numerics.

If the arithmetic changes, a test fails and says what to do. To add a training, write its name and
arguments into mpidl/training/golden_hashes.toml, and run

    PYTHONPATH=tests/support python tests/training/test_golden.py

which writes the hashes. It needs builds of the kernels with and without fused multiply-adds.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from cpu_builds import BUILDS, FUSED_BUILDS, needs_kernels

from mpidl import backends, numerics
from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.errors import Fault, UserError
from mpidl.training import golden

ROOT = Path(__file__).resolve().parents[2]
TRAININGS = {training.name: training for training in golden.table().trainings}
HEADER = """\
# Short trainings and the SHA-256 of the weights that they give (`dl.weights_sha256`), with and
# without fused multiply-adds. tests/training/test_golden.py explains how to add a training, and
# docs/numerics.md when the hashes may change.
"""
ADVICE = (
    "The arithmetic has changed. If it should not have, find the change. Otherwise, follow "
    "docs/numerics.md: increase VERSION in mpidl/numerics.py, add a row to the table of versions "
    "in docs/numerics.md and an entry to CHANGELOG.md, and write the hashes as the docstring of "
    "tests/training/test_golden.py says."
)


def contents(version, trainings):
    """Return the contents of golden_hashes.toml."""
    lines = [f"{HEADER}\nnumerics = {version}\n"]
    for name, arguments, hashes in trainings:
        lines += [f'\n[[training]]\nname = "{name}"\narguments = "{arguments}"\n']
        lines += [f'{kind} = "{digest}"\n' for kind, digest in hashes.items()]
    return "".join(lines)


def write():
    """Write the hashes, unless hashes of the current numerics have changed."""
    if "generic" not in BUILDS or FUSED_BUILDS[:1] in ([], ["generic"]):
        sys.exit(f"expected builds with and without fused multiply-adds, found {BUILDS}")
    trainings, changes = [], []
    for name, arguments, hashes in golden.table().trainings:
        measured = {}
        for build in FUSED_BUILDS[0], "generic":
            builds.use(build)
            measured[golden.arithmetic()] = golden.weights_of(arguments)
        changes += [f"{name} ({kind})" for kind in hashes if hashes[kind] != measured[kind]]
        trainings.append(golden.Training(name, arguments, measured))
    if changes and golden.table().numerics == numerics.VERSION:
        sys.exit(f"{', '.join(changes)}: other weights. {ADVICE}")
    Path(golden.PATH).write_text(contents(numerics.VERSION, trainings))


def assert_golden(names=None):
    for outcome in golden.check(names):
        assert outcome.actual == outcome.expected, f"{outcome.name}: other weights. {ADVICE}"


@needs_kernels
@pytest.mark.parametrize("name", TRAININGS)
def test_this_build_computes_the_golden_hashes(name):
    assert_golden([name])


@pytest.mark.parametrize("build", [build for build in BUILDS if build != builds.running()])
@pytest.mark.slow("ranks")
def test_the_other_builds_compute_the_golden_hashes(build):
    before = builds.running()
    builds.use(build)
    try:
        assert_golden()
    finally:
        builds.use(before)


def test_the_hashes_belong_to_the_numerics():
    """The bytes, the number, the page and the change log change together."""
    table = golden.table()
    assert table.numerics == numerics.VERSION, ADVICE
    assert Path(golden.PATH).read_text() == contents(*table), "write the file as the script does"
    assert all(set(training.hashes) == set(golden.ARITHMETICS) for training in table.trainings)
    page = (ROOT / "docs" / "numerics.md").read_text()
    versions = [int(row) for row in re.findall(r"^\| (\d+) \|", page, re.M)]
    assert versions == list(range(1, numerics.VERSION + 1)), ADVICE
    log = (ROOT / "CHANGELOG.md").read_text()
    assert all(f"Numerics {version}: " in log for version in versions[1:]), ADVICE


@needs_kernels
def test_a_rank_may_check_alone_within_a_job(world, monkeypatch):
    """The settings of the process and the world of the job stay as they are."""
    monkeypatch.setattr(settings, "winograd", "off")
    monkeypatch.setattr(settings, "precision", "bf16")
    before, build = dict(vars(settings)), builds.running()
    if world.rank == world.size - 1:
        assert_golden(["residual fast"])
    assert (dict(vars(settings)), builds.running()) == (before, build)
    assert world.gop("sum", 1) == world.size


@needs_kernels
def test_negative_control_another_seed():
    arguments, hashes = TRAININGS["digits"][1:]
    assert golden.weights_of(f"{arguments} --seed 1") != hashes[golden.arithmetic()]


@needs_kernels
def test_negative_control_another_kernel(monkeypatch):
    """The last bit of one product in one kernel changes the hash."""
    library = builds.kernels()
    dense = library.dense

    def other_dense(*arguments):
        dense(*arguments)
        for kind, array in zip(library.argument_types("dense"), arguments, strict=True):
            if isinstance(array, np.ndarray) and not kind.const:
                array.reshape(-1).view(np.uint8)[0] ^= 1

    monkeypatch.setattr(library, "dense", other_dense)
    with pytest.raises(AssertionError, match="digits: other weights. The arithmetic has changed"):
        assert_golden(["digits"])


@needs_kernels
def test_hashes_of_another_numerics_are_not_compared(monkeypatch):
    monkeypatch.setattr(numerics, "VERSION", numerics.VERSION + 1)
    with pytest.raises(Fault, match=f"expected hashes of numerics {numerics.VERSION}, found"):
        golden.check(["digits"])


@pytest.mark.skipif(
    "generic" not in BUILDS or len(FUSED_BUILDS) < 2,
    reason="it needs the build generic and two builds with fused multiply-adds, as on x86-64",
)
def test_changed_hashes_are_written_only_for_another_numerics(monkeypatch, tmp_path):
    path, before = tmp_path / "golden_hashes.toml", builds.running()
    name, arguments, hashes = TRAININGS["digits"]
    altered = golden.Training(name, arguments, hashes | {golden.FUSED: "0" * 64})
    monkeypatch.setattr(golden, "PATH", str(path))
    monkeypatch.setattr(golden, "table", lambda: golden.Table(numerics.VERSION, [altered]))
    try:
        with pytest.raises(
            SystemExit, match=r"digits \(fused\): other weights. .* increase VERSION"
        ):
            write()
        assert not path.exists()
        monkeypatch.setattr(golden, "table", lambda: golden.Table(numerics.VERSION - 1, [altered]))
        write()
        assert path.read_text() == contents(numerics.VERSION, [TRAININGS["digits"]])
    finally:
        builds.use(before)


def test_refusals(monkeypatch):
    with pytest.raises(UserError, match=r"no training digit; did you mean digits\?|no training"):
        golden.check(["digit"])
    monkeypatch.setattr(settings, "on_gpu", True)
    with pytest.raises(UserError, match="found a GPU, whose hashes have not been measured yet"):
        golden.check()
    monkeypatch.setattr(settings, "on_gpu", False)
    monkeypatch.setattr(builds.process, "build", "numpy")
    with pytest.raises(UserError, match="found NumPy, whose weights depend on its BLAS"):
        golden.check()


@needs_kernels
@pytest.mark.slow("ranks")
def test_threads_do_not_matter():
    threads = settings.threads
    try:
        for count in 2, 3:
            backends.configure(threads=count)
            assert_golden(["many layers"])
    finally:
        backends.configure(threads=threads)


if __name__ == "__main__":
    write()
