"""Fixtures of the tests of audits: an honest run with its files, and a machine that is right."""

import shutil

import pytest
from audited_files import SIGNER, new_key
from certified_runs import train_run, write_data

from mpidl.training import golden


@pytest.fixture(scope="session")
def honest(tmp_path_factory):
    """A folder with a set, an honest certified run, its key, and the file of its signers."""
    folder = tmp_path_factory.mktemp("honest")
    write_data(folder / "set.npz")
    key = new_key(folder / "key")
    signer = f"{SIGNER} {key.with_suffix('.pub').read_text()}"
    (folder / "signers").write_text(signer)
    train_run(folder / "set.npz", folder / "run", "--certify-key", key)
    return folder


@pytest.fixture
def machine(monkeypatch):
    """Let the golden hashes agree at once, because their trainings take seconds."""
    monkeypatch.setattr(golden, "check", lambda: [golden.Outcome("digits", "aa", "aa")])


@pytest.fixture
def files(honest, tmp_path):
    """A copy of the files of an honest run, for a test that changes them."""
    return shutil.copytree(honest, tmp_path / "files")
