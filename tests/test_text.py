"""Texts of messages."""

import pytest

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
