"""Test that run/release finds what is missing in a version, and makes the tag of a complete one."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from cpu_builds import needs_kernels
from launcher import ROOT

import mpidl

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
    """Return a clone of this checkout, with its changes and its compiled kernels.

    The clone has no tags and an entry in [Unreleased], also if this checkout has been released.
    """
    folder = tmp_path / "mpidl"
    git(tmp_path, "clone", "-q", "--no-tags", ROOT, folder)
    names = git(ROOT, "ls-files", "-z", "--modified", "--others", "--exclude-standard")
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "kernels" / "lib", folder / "kernels" / "lib", dirs_exist_ok=True)
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- An entry.\n")
    commit(folder)
    return folder


def git(folder, *words):
    words = "git", "-c", "user.name=tests", "-c", "user.email=tests@localhost", *words
    return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "state of the test")


def release(folder, *words, identity=True):
    """Run run/release, with or without a name for git."""
    variables = {**os.environ, "MPIDL_VENV": sys.prefix, "GIT_CONFIG_GLOBAL": os.devnull}
    keys = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "user.useConfigOnly"}
    variables |= keys | {"GIT_CONFIG_VALUE_0": "true"}
    for person in ("AUTHOR", "COMMITTER"):
        names = {f"GIT_{person}_NAME": "tests", f"GIT_{person}_EMAIL": "tests@localhost"}
        variables = {key: value for key, value in variables.items() if key not in names}
        variables |= names if identity else {}
    words = folder / "run" / "release", *words
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)


def test_a_complete_version_is_ready(checkout):
    result = release(checkout, "--check")
    assert result.returncode == 0 and "is ready" in result.stderr, result.stderr
    assert git(checkout, "tag") == ""  # --check changes nothing


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


@pytest.fixture
def quick_checkout(checkout):
    """Return a clone in which the long checks do nothing."""
    for name in (".ci/run", "run/wheel"):
        (checkout / name).write_text("#!/bin/sh\n")
    (checkout / "mpidl" / "verify.py").write_text("")
    commit(checkout)
    return checkout


def test_a_release_is_a_tag_with_the_date(quick_checkout):
    tested = git(quick_checkout, "rev-parse", "HEAD")
    result = release(quick_checkout)
    assert result.returncode == 0, result.stderr
    tag = "v" + mpidl.__version__
    assert git(quick_checkout, "rev-parse", f"{tag}^{{}}", f"{tag}^") == (
        git(quick_checkout, "rev-parse", "HEAD") + tested
    )
    assert git(quick_checkout, "diff", "--name-only", "HEAD^").split() == ["CHANGELOG.md"]
    changes = (quick_checkout / "CHANGELOG.md").read_text()
    heading = rf"## \[{tag[1:]}\] - \d{{4}}-\d\d-\d\d"
    assert re.fullmatch(rf"# Changelog\n\n## \[Unreleased\]\n\n{heading}\n\n- An entry.\n", changes)
    result = release(quick_checkout, "--check")
    assert result.returncode == 1 and f"the tag {tag} already exists" in result.stderr


def fails_to_commit(checkout):
    hook = checkout / ".git" / "hooks" / "pre-commit"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)


def changes_while_checked(checkout):
    (checkout / "run" / "wheel").write_text("#!/bin/sh\necho '# New' >>README.md\n")
    commit(checkout)


def fails_to_tag(checkout):
    git(checkout, "config", "tag.gpgSign", "true")
    git(checkout, "config", "gpg.program", "/bin/false")


STOPS = {
    "the checkout is as before": fails_to_commit,
    "git cannot make the commit or the tag": fails_to_tag,
    "the checkout has changed during the checks": changes_while_checked,
    "expected user.name and user.email": None,
}


@pytest.mark.parametrize("message", STOPS)
def test_a_release_that_fails_leaves_no_commit(quick_checkout, message):
    prepare = STOPS[message]
    if prepare:
        prepare(quick_checkout)
    before = git(quick_checkout, "rev-parse", "HEAD")
    result = release(quick_checkout, identity=prepare is not None)
    assert result.returncode != 0 and message in result.stderr, result.stderr
    assert git(quick_checkout, "rev-parse", "HEAD") == before and git(quick_checkout, "tag") == ""
    assert git(quick_checkout, "status", "--porcelain", "CHANGELOG.md") == ""
