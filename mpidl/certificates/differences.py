"""Say in words what differs between the images of a certificate and those of an auditor.

With salts, the digest of an image depends on its number. Whether an image of the auditor is image i
of the certificate is therefore found by hashing it once more, with the salt of image i.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mpidl.certificates.images import ImageDigests, read_chunk, row_views
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError
from mpidl.text import class_names, name_list

WINDOW = 32  # largest number of consecutive images that were changed, left out or added
MOST_GAPS = 100  # with more, the sets have little in common
PROBES = 17  # images that are compared in a run of images that have moved together
SAMPLE = 12  # images that are looked up if the sets have little in common
BUDGET = 4 << 30  # bytes to hash for one question


class _Gap(NamedTuple):
    """Consecutive images of the certificate and of the auditor that do not correspond."""

    expected: range
    actual: range


def differences(
    expected: np.ndarray, actual: np.ndarray, store: Datastore, salt: bytes | None, name: str
) -> list[str]:
    """Return lines that say how the images of a set differ from those of a certificate.

    The lines name changed labels and pixels, swapped, moved, missing and added images. If the sets
    have little in common, a few images are looked up. Only images that may have changed are read:
    with a salt, images after a missing or an added one are only probed.

    Parameters
    ----------
    expected, actual : ndarray
        The digests (n, 32), uint8, of the certificate's images and of the auditor's.
    store : Datastore
        The auditor's images.
    salt, name
        As for `images.digests`.

    Returns
    -------
    list of str
        The lines; empty if all digests are equal.
    """
    if np.array_equal(expected, actual):
        return []
    sets = _Sets(expected, actual, store, salt, name)
    gaps = _find_gaps(sets)
    lines = None if gaps is None else _explain(sets, gaps)
    return _sample(sets) if lines is None else lines


class _Sets:
    """The images of a certificate, of which only the digests are known, and of an auditor."""

    def __init__(self, expected, actual, store, salt, name):
        self.expected, self.actual, self.store = expected, actual, store
        self.has_salt, self.digests = salt is not None, ImageDigests(store, salt, name)
        self.image_bytes = int(np.prod(store.image_shape)) * np.dtype(store.dtype).itemsize

    def affords(self, count: int) -> bool:
        """Return whether `count` images can be hashed in seconds."""
        return count * self.image_bytes <= BUDGET

    def contents(self, j: int) -> tuple[memoryview, memoryview | None] | None:
        """Return the bytes of the auditor's image j and its label, or None if it is unreadable."""
        try:
            chunk = read_chunk(self.store, np.array([j]))
        except UserError:
            return None
        labels = None if chunk.labels is None else row_views(chunk.labels)[0]
        return row_views(chunk.pixels)[0], labels

    def places(self, j: int, candidates: Iterable[int]) -> list[int]:
        """Return those of some images of the certificate that are the auditor's image j."""
        places = np.fromiter(candidates, np.int64)
        if not self.has_salt or not self.actual[j].any():  # an unreadable image has zeros
            return places[(self.expected[places] == self.actual[j]).all(1)].tolist()
        if (contents := self.contents(j)) is None:
            return []
        rows = ((i, self.expected[i].tobytes()) for i in places.tolist())
        return [i for i, digest in rows if self.digests.digest(i, *contents) == digest]

    def correspond(self, i: int, j: int) -> bool:
        """Return whether the auditor's image j is image i. The ends of the sets correspond."""
        if i >= len(self.expected) or j >= len(self.actual):
            return i == len(self.expected) and j == len(self.actual)
        if i == j:
            return bool((self.expected[i] == self.actual[i]).all())
        return bool(self.places(j, [i]))


def _find_gaps(sets):
    """Return the gaps between corresponding images in order. None if there are too many."""
    gaps: list[_Gap] = []
    i = j = 0
    while True:
        count = _count_equal(sets, i, j)
        i, j = i + count, j + count
        if i == len(sets.expected) and j == len(sets.actual):
            return gaps
        sizes = _gap_sizes(sets, i, j)
        if sizes is None or len(gaps) == MOST_GAPS:
            return None
        gaps.append(_Gap(range(i, i + sizes[0]), range(j, j + sizes[1])))
        i, j = i + sizes[0], j + sizes[1]


def _count_equal(sets, i, j):
    """Return how many images from i and j on correspond.

    With salts, images that have moved together are probed, and the first change is bisected.
    """
    count = min(len(sets.expected) - i, len(sets.actual) - j)
    if i == j or not sets.has_salt:
        equal = (sets.expected[i : i + count] == sets.actual[j : j + count]).all(1)
        return count if equal.all() else int(np.argmin(equal))
    first = 0  # all images before this one are taken as equal
    for probe in np.unique(np.linspace(0, max(count - 1, 0), PROBES).astype(int)).tolist():
        if probe < count and not sets.correspond(i + probe, j + probe):
            while first < probe:
                middle = (first + probe) // 2
                if sets.correspond(i + middle, j + middle):
                    first = middle + 1
                else:
                    probe = middle
            return probe
        first = probe + 1
    return count


def _gap_sizes(sets, i, j):
    """Return how many images of the certificate and of the auditor to pass over, or None.

    The smallest gap is searched after which images correspond again, first without a move.
    """
    for size in range(1, WINDOW + 1):
        if sets.correspond(i + size, j + size):
            return size, size
    rest = len(sets.expected) - i, len(sets.actual) - j
    sizes = [rest] if max(rest) <= WINDOW else []
    candidates = range(i, min(i + WINDOW + 1, len(sets.expected)))
    for skipped in range(min(WINDOW + 1, rest[1])):
        places = sets.places(j + skipped, candidates)
        sizes += [(place - i, skipped) for place in places]
    return min(sizes, key=sum, default=None)


def _explain(sets, gaps):
    """Return lines about the images in the gaps, or None if there are too many to hash."""
    expected = [i for gap in gaps for i in gap.expected]
    actual = [j for gap in gaps for j in gap.actual]
    if not sets.affords(len(expected) * len(actual)):
        return None
    moved: dict[int, int] = {}  # {auditor's image: image of the certificate}
    not_found = dict.fromkeys(expected)
    for j in actual:
        if places := [i for i in sets.places(j, expected) if i in not_found]:
            moved[j] = places[0]
            del not_found[places[0]]
    changed, missing, added = [], [], []
    for gap in gaps:
        lost = [i for i in gap.expected if i in not_found]
        new = [j for j in gap.actual if j not in moved]
        both = min(len(lost), len(new))
        changed += zip(lost[:both], new[:both], strict=True)
        missing += lost[both:]
        added += new[both:]
    slots = {j: i for gap in gaps for i, j in zip(gap.expected, gap.actual, strict=False)}
    lines = _describe_moves(sets, moved, slots) + _describe_changes(sets, changed)
    if missing:
        names = name_list([f"image {i}" for i in missing])
        lines.append(f"{_images(missing)} missing: {names} of the certificate")
    if added:
        lines.append(f"{_images(added)} added: {name_list(_added_names(sets, added))}")
    return lines


def _describe_moves(sets, moved, slots):
    """Return lines about swapped and moved images. `slots` are places without moves."""
    auditor_places = {i: j for j, i in slots.items()}
    pairs, movers = [], []
    for j, i in moved.items():
        other = auditor_places.get(i)
        if other is not None and moved.get(other) == slots.get(j, -1):
            pairs += [f"{sets.store.name(j)} and {sets.store.name(other)}"] if j < other else []
        else:
            movers.append(f"{sets.store.name(j)} (is image {i} of the certificate)")
    plural = "" if len(pairs) == 1 else "s"
    lines = [f"{len(pairs)} pair{plural} of images swapped: {name_list(pairs)}"] if pairs else []
    return lines + ([f"{_images(movers)} moved: {name_list(movers)}"] if movers else [])


def _describe_changes(sets, changed):
    """Return lines about images whose place is the same. `changed` has pairs (i, j)."""
    names: dict[str, list[str]] = {}  # {what has changed: images}
    is_cheap = sets.affords(len(changed) * _label_count(sets.store))
    for i, j in changed:
        kind, detail = _change(sets, i, j, is_cheap)
        names.setdefault(kind, []).append(sets.store.name(j) + detail)
    return [f"{_images(images)} {kind}: {name_list(images)}" for kind, images in names.items()]


def _change(sets, i, j, tries_labels):
    """Return what has changed in an image, and details."""
    store = sets.store
    contents = sets.contents(j) if sets.expected[i].any() and sets.actual[j].any() else None
    if contents is None:
        return "readable in only one of the sets", ""
    if store.targets_shape is not None or store.labels is None or not tries_labels:
        return "changed", ""
    label, names = int(store.labels[j]), class_names(store.classes, _label_count(store))
    for other in range(len(names)):
        digest = sets.digests.digest(i, contents[0], row_views(np.array([other], np.int64))[0])
        if digest == sets.expected[i].tobytes():
            return (
                "with another label",
                f" (was {_label_text(other, names)}, is {_label_text(label, names)})",
            )
    return "with other pixels", ""


def _label_text(label, names):
    return str(label) if names[label] == str(label) else f"{label} ({names[label]})"


def _label_count(store):
    """Return the number of labels that an image of a set may have."""
    highest = -1 if store.labels is None else int(np.max(store.labels, initial=-1))
    return max(len(store.classes), highest + 1)


def _added_names(sets, added):
    """Yield the names of added images. Of few, say which image of the certificate they repeat."""
    is_cheap = sets.affords(len(added) * len(sets.expected))
    return [sets.store.name(j) + (_copy_of(sets, j) if is_cheap else "") for j in added]


def _copy_of(sets, j):
    places = sets.places(j, range(len(sets.expected)))
    return f" (a copy of image {places[0]} of the certificate)" if places else ""


def _sample(sets):
    """Return lines about sets with little in common, from looking up a few images."""
    shared = min(len(sets.expected), len(sets.actual))
    is_different = np.ones(len(sets.actual), bool)
    is_different[:shared] = (sets.expected[:shared] != sets.actual[:shared]).any(1)
    (different,) = np.nonzero(is_different)
    line = f"{len(different)} of {len(sets.actual)} images differ"
    if len(sets.actual) != len(sets.expected):
        line += f", and the certificate has {len(sets.expected)} images"
    affordable = min(SAMPLE, len(different), BUDGET // max(1, sets.image_bytes * shared))
    if not affordable:
        return [line]
    rows = different[np.linspace(0, len(different) - 1, affordable).astype(int)]
    places = {int(j): sets.places(j, range(len(sets.expected))) for j in rows}
    elsewhere = [f"{sets.store.name(j)} (is image {i[0]})" for j, i in places.items() if i]
    unknown = [sets.store.name(j) for j, i in places.items() if not i]
    lines = [f"{line}; {affordable} of them were looked up"]
    if elsewhere:
        text = "elsewhere in the certificate (another order)"
        lines.append(f"{_images(elsewhere)} {text}: {name_list(elsewhere)}")
    if unknown:
        lines.append(f"{_images(unknown)} not in the certificate: {name_list(unknown)}")
    return lines


def _images(items: Sequence[object]) -> str:
    return f"{len(items)} image{'s' if len(items) != 1 else ''}"
