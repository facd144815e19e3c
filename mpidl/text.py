"""Format paths, names and tables for messages."""

import os
import re
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
NAMES_IN_A_LINE = 10  # maximum number of names that `name_list` writes; the rest are only counted


def printable(path: str | bytes | os.PathLike) -> str:
    """Return a path, or another string from a file, as one line that any terminal can print.

    Bytes that are not UTF-8 and unprintable characters are replaced by escapes such as ``\\xNN``.
    """
    text = os.fsdecode(path)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character):
    """Return the escape of a character, or of a byte that os.fsdecode could not decode."""
    byte = ord(character) - 0xDC00
    if 0x80 <= byte <= 0xFF:
        return f"\\x{byte:02x}"
    return character.encode("unicode_escape").decode()


def pip_install(extra: str) -> str:
    """Return the command that installs an extra of setup.cfg in this environment.

    The command contains the name of the package if pip has installed the package, even from a
    checkout. Otherwise the command contains the folder that Python imports, because a package index
    may have another package with this name.
    """
    import importlib.metadata  # imported here, because only error messages need it

    try:
        importlib.metadata.distribution("mpidl")
        source = "mpidl"
    except importlib.metadata.PackageNotFoundError:
        source = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return f"pip install '{source}[{extra}]'"


def name_list(names: Sequence[str]) -> str:
    """Join names with commas, such as "circle, square". Names after the 10th are only counted."""
    rest = len(names) - NAMES_IN_A_LINE
    tail = f" and {rest} more" if rest > 0 else ""
    return ", ".join(printable(name) for name in names[:NAMES_IN_A_LINE]) + tail


def ranges(numbers: Iterable[int], width: int = 0) -> str:
    """Format numbers as ranges: {0, 1, 2, 5} becomes "0-2,5".

    Numbers are padded with zeros to at least `width` digits.
    """
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(
        f"{first:0{width}}" + (f"-{last:0{width}}" if last > first else "") for first, last in parts
    )


def host_list(hosts: Iterable[str]) -> str:
    """Join the names of hosts in the notation of Slurm, such as "n[001-064], login".

    Groups after the 10th are only counted.

    Parameters
    ----------
    hosts : iterable of str
        Names of hosts, possibly with repetitions.
    """
    groups: dict[tuple[str, str], dict[str, None]] = {}  # {(text before, text after): numbers}
    for host in dict.fromkeys(hosts):
        match = re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", host)
        before, number, after = match.groups() if match else (host, "", "")
        groups.setdefault((before, after), {})[number] = None
    names = []
    for (before, after), numbers in groups.items():
        is_padded = any(number.startswith("0") and len(number) > 1 for number in numbers)
        by_width: dict[int, list[str]] = {}
        for number in numbers:
            by_width.setdefault(len(number) if is_padded else 0, []).append(number)
        for width, members in by_width.items():
            text = members[0]
            if len(members) > 1:
                text = f"[{ranges(map(int, members), width)}]"
            names.append(f"{before}{text}{after}")
    return name_list(names)


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return {key: its values in order} of pairs (key, value), in the order of the first pairs."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def class_names(classes: Iterable | None, count: int) -> tuple[str, ...]:
    """Return `count` class names. A class without a name in `classes` is named by its index."""
    names = [str(name) for name in classes or ()]
    return tuple([*names, *map(str, range(len(names), count))][:count])


def sorted_classes(names: Iterable[str]) -> list[str]:
    """Return the different names: by value if all are whole numbers, by bytes otherwise."""
    different = set(names)
    are_numbers = all(name.isascii() and name.isdigit() and len(name) < 19 for name in different)
    return sorted(different, key=lambda n: (int(n) if are_numbers else 0, os.fsencode(n)))


def did_you_mean(
    name: object, candidates: Iterable[str], synonyms: Mapping[str, str] | None = None
) -> str:
    """Return ": did you mean X?" for the candidate most similar to a name, or "".

    Case, dashes and underscores are ignored. `synonyms` maps names from other libraries to
    candidates. The keys of `synonyms` are in lower case, without dashes and underscores.
    """
    name, candidates = str(name), list(candidates)
    plain = _plain(name)
    accepted = {plain, _plain((synonyms or {}).get(plain, plain))}
    matches = [candidate for candidate in candidates if _plain(candidate) in accepted]
    matches = matches or [c for c in candidates if name and c.startswith(name)]
    by_plain_name = {_plain(candidate): candidate for candidate in candidates}
    import difflib  # only for an error message

    close = difflib.get_close_matches(plain, by_plain_name, n=1, cutoff=0.6)
    matches = matches or [by_plain_name[match] for match in close]
    return f": did you mean {printable(matches[0])}?" if matches else ""


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()


def aligned(rows: Iterable[Sequence[object]], left: int | Container[int] = 1) -> list[str]:
    """Format rows as lines of a table.

    The first `left` columns, or the columns in `left`, are left-aligned, and the others are
    right-aligned.
    """
    left = range(left) if isinstance(left, int) else left
    table = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
