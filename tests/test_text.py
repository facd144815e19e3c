"""Texts of messages."""

import pytest

from mpidl.errors import UserError
from mpidl.text import printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("photos/é.png", "photos/é.png"),
        (b"caf\xe9 \xc3\xa9", "caf\\xe9 é"),
        ("caf\udce9", "caf\\xe9"),  # the same bytes, as os.listdir returns them
        ("half of a pair: \ud800", "half of a pair: \\ud800"),  # JSON may contain it
        ("a\nb\x1b", "a\\nb\\x1b"),
    ],
)
def test_any_string_is_one_printable_line(text, expected):
    assert printable(text) == expected
    expected.encode()


def test_the_message_of_an_error_is_one_short_line():
    """It may quote a value of a file."""
    assert str(UserError("a.toml: found b")) == "a.toml: found b"
    assert str(UserError("found a\nb\udcff")) == "found a\\nb\\xff"
    text = str(UserError(f"a.toml: found {'9' * 5000}; expected a number"))
    assert len(text) < 1000 and text.startswith("a.toml: found 99")
    assert " ... 99" in text and text.endswith("99; expected a number")
