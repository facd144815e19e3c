"""Test that run/release finds what is missing in a version."""

import os
import shutil
import subprocess
import sys

import pytest
from cpu_builds import needs_kernels
from launcher import ROOT

pytestmark = [needs_kernels, pytest.mark.slow("jobs")]


def edited(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def wrong_version(checkout):
    edited(checkout / "mpidl" / "__init__.py", '__version__ = "', '__version__ = "9.')


def no_entries(checkout):
    edited(
        checkout / "CHANGELOG.md", "## [Unreleased]", "## [Unreleased]\n\n## [0.0.9] - 2020-01-01"
    )


def another_hash(checkout):
    edited(checkout / "mpidl" / "training" / "golden_hashes.toml", 'fused = "', 'fused = "0')


FAULTS = {
    "CITATION.cff: expected version 9.": wrong_version,
    "CHANGELOG.md: expected entries in the section [Unreleased], found none": no_entries,
    "the golden hashes differ": another_hash,
}


@pytest.fixture
def checkout(tmp_path):
    """Return a clone of this checkout, with its changes and its compiled kernels."""
    folder = tmp_path / "mpidl"
    git(tmp_path, "clone", "-q", ROOT, folder)
    names = git(ROOT, "ls-files", "-z", "--modified", "--others", "--exclude-standard")
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "kernels" / "lib", folder / "kernels" / "lib", dirs_exist_ok=True)
    commit(folder)
    return folder


def git(folder, *words):
    words = "git", "-c", "user.name=tests", "-c", "user.email=tests@localhost", *words
    return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "state of the test")


def release(folder, *words):
    variables = {**os.environ, "MPIDL_VENV": sys.prefix}
    words = folder / "run" / "release", *words
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)


def test_a_complete_version_is_ready(checkout):
    result = release(checkout, "--check")
    assert result.returncode == 0 and "is ready" in result.stderr, result.stderr
    assert git(checkout, "tag") == git(ROOT, "tag")  # --check changes nothing


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_is_found(checkout, message):
    FAULTS[message](checkout)
    commit(checkout)
    result = release(checkout, "--check")
    assert result.returncode == 1 and message in result.stderr, result.stderr


def test_uncommitted_changes_and_unknown_options_are_found(checkout):
    (checkout / "new.txt").write_text("not committed\n")
    result = release(checkout, "--check")
    assert result.returncode == 1 and "uncommitted changes" in result.stderr
    assert release(checkout, "--now").returncode == 2
