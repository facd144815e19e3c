"""Test the formatting of messages."""

import configparser
import importlib.metadata
import re
from pathlib import Path

import pytest

from mpidl.errors import UserError
from mpidl.text import pip_install, printable

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("photos/é.png", "photos/é.png"),
        (b"caf\xe9 \xc3\xa9", "caf\\xe9 é"),
        ("caf\udce9", "caf\\xe9"),  # the same bytes, as os.listdir returns them
        ("half of a pair: \ud800", "half of a pair: \\ud800"),  # JSON may contain half of a pair
        ("a\nb\x1b", "a\\nb\\x1b"),
    ],
)
def test_any_string_is_one_printable_line(text, expected):
    assert printable(text) == expected
    expected.encode()


def test_the_message_of_an_error_is_one_short_line():
    """A message is one short line, even if it quotes a long value from a file."""
    assert str(UserError("a.toml: found b")) == "a.toml: found b"
    assert str(UserError("found a\nb\udcff")) == "found a\\nb\\xff"
    text = str(UserError(f"a.toml: found {'9' * 5000}; expected a number"))
    assert len(text) < 1000 and text.startswith("a.toml: found 99")
    assert " ... 99" in text and text.endswith("99; expected a number")


@pytest.mark.parametrize("is_installed", [True, False])
def test_pip_install(monkeypatch, is_installed):
    """If mpidl is not installed, the command names the checkout, not a package on an index."""

    def distribution(name):
        if not is_installed:
            raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    source = "mpidl" if is_installed else ROOT
    assert pip_install("plots") == f"pip install '{source}[plots]'"


def test_messages_name_extras_that_exist():
    """Each call of pip_install and each command in a docstring names an extra of setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    names, other = set(), []
    for path in [*(ROOT / "mpidl").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        source = path.read_text()
        names |= set(re.findall(r"""pip_install\(["'](\w+)["']\)|'mpidl\[(\w+)\]'""", source))
        other += re.findall(r"pip install '\.\[.*", source)
    assert {name for pair in names for name in pair if name} <= set(setup["options.extras_require"])
    assert names and not other
