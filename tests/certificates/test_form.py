"""Test that the program in the wing's README checks a certificate without mpidl."""

import json
from pathlib import Path

import certified_runs
import documented_commands
import pytest
from image_sets import grow

from mpidl.certificates import certificate

README = Path(certificate.__file__).parent / "README.md"
OPTIONS = "--epochs 2 --batch-size 16 --test-fraction 0 --plots none --verbose off --device cpu"


@pytest.fixture(scope="module")
def program():
    ((_, language, source),) = documented_commands.fences(README.read_text())
    assert language == "python" and "mpidl" not in source
    return compile(source, README.name, "exec")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a private run, which has the folder of its images beside the certificate."""
    grow(tmp_path / "photos", ("circle", "square"), per_class=12, shape=(3, 10, 10))
    for path in (tmp_path / "photos").glob("*/?.png"):
        path.rename(path.with_name(f"000{path.name}"))
    words = ["--network", certified_runs.NETWORK, "--data", tmp_path / "photos", *OPTIONS.split()]
    certified_runs.train_command(*words, "--certify", "private", "--out", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_program_of_the_readme(run, program):
    exec(program, {})


def change_link(run):
    statement = json.loads((run / "certificate.json").read_text())
    statement["predicate"]["chain"][1]["epoch"] += 1
    (run / "certificate.json").write_text(json.dumps(statement))


def change_image(run):
    name = run / "photos" / "circle" / "0000.png"
    name.write_bytes(name.with_name("0001.png").read_bytes())


def change_salt(run):
    (run / "certificate-salt.txt").write_text("0" * 64)


@pytest.mark.parametrize("change", [change_link, change_image, change_salt])
def test_the_program_finds_changes(run, program, change):
    """Negative control."""
    change(run)
    with pytest.raises(AssertionError):
        exec(program, {})
