"""Damage the bytes of a file at random."""

NUMBERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]  # sizes or offsets
# Texts that may break parsers of JSON, TOML and CSV.
TOKENS = [
    *(b"[" * 2000, b'{"a":' * 2000, b"a." * 2000, b"9" * 5000, b"1e999", b"-1e999", b"NaN", b"inf"),
    *(b"-1", b"0", b"null", b"true", b"{}", b"[]", b'""', b'"', b"'", b"\n", b"\r\n", b"\r", b","),
    *(
        b"=",
        b"\0",
        b"\xff",
        b"\xed\xa0\x80",
        b'"\\ud800"',
        b"\xef\xbb\xbf",
        b"18446744073709551616",
    ),
]
DAMAGES = ["set", "set", "bits", "number", "token", "word", "cut", "out", "twice"]


def damaged(content, numbers):
    """Return a file's bytes after some of them were changed, removed, doubled, or cut off.

    `numbers` is a random.Random.
    """
    data = bytearray(content)
    for _ in range(numbers.randint(1, 4)):
        i, damage = numbers.randint(0, max(len(data) - 1, 0)), numbers.choice(DAMAGES)
        if damage == "set":
            data[i : i + 1] = bytes([numbers.randrange(256)])
        elif damage == "bits" and data:
            data[i] ^= 1 << numbers.randrange(8)
        elif damage == "number":
            value = numbers.choice(NUMBERS)
            data[i : i + 8] = value.to_bytes(8, numbers.choice(["little", "big"]))
        elif damage == "token":
            data[i:i] = numbers.choice(TOKENS)
        elif damage == "word":  # a value of JSON, TOML or CSV
            start, end = _word(data, i)
            data[start:end] = numbers.choice(TOKENS)
        elif damage == "cut":
            del data[i:]
        elif damage == "out":
            del data[i : i + numbers.randint(1, 64)]
        else:
            data[i:i] = data[i : i + numbers.randint(1, 64)]
    return bytes(data)


def endless(content):
    """Damage a model file so that HDF5 never finishes reading its attributes.

    The text "mpidl" is an object in HDF5's global heap. Its size is changed so that no heap space
    remains after it.
    """
    number, size, text = (5).to_bytes(8, "little"), 222, b"mpidl"
    assert content.count(number + text) == 1
    return content.replace(number + text, size.to_bytes(8, "little") + text)


def _word(data, i):
    """Return the bounds of the word around a position; words are between text separators."""
    separators = b" ,:=[]{}\n"
    start, end = i, i
    while start > max(0, i - 40) and data[start - 1] not in separators:
        start -= 1
    while end < min(len(data), i + 40) and data[end] not in separators:
        end += 1
    return start, end


def random_bytes(content, beginning, numbers):
    """Return the first bytes of a valid file, followed by up to 600 random bytes."""
    return content[:beginning] + numbers.randbytes(numbers.randint(0, 600))


def hostile(content, beginning, numbers):
    """Return a valid file's bytes, damaged or, in 1/8 of cases, random after the beginning."""
    if numbers.random() < 0.125:
        return random_bytes(content, beginning, numbers)
    return damaged(content, numbers)
