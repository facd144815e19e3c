"""Test that any bytes of a data file give a datastore or a one-line UserError, in little memory.

The inputs are random bytes after a valid header, and valid files in which a few bytes are changed,
removed, repeated or cut off. Files that open are also read. The module `fuzzing` chooses the
examples.
"""

import h5py
import numpy as np
import parsers
import pytest
from fuzzing import EXAMPLES, FUZZ, bounded, fuzz, impatient
from hypothesis import given
from hypothesis import strategies as st
from image_sets import pixels_of

from mpidl.data import ArrayDatastore
from mpidl.data.formats import pack_contents, packing
from mpidl.errors import UserError

__all__ = ["bounded", "impatient"]
TEXT = st.characters(min_codepoint=1, codec="utf-8")  # characters of HDF5 attributes


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # about ignored metadata
@pytest.mark.parametrize("name", parsers.IMAGES)
def test_damaged_files_of_images(tmp_path, name):
    fuzz(name, tmp_path)


CLASSES = [
    "[" * 5000,
    '["a"]',
    '["\\ud800", "\\udcff", "c"]',
    '["a", "b", 3]',
    '{"a": 1}',
    "[1e999]",
]

SIGNED = st.integers(-(2**63), 2**63 - 1)


@FUZZ
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "format_version": st.one_of(st.integers(-1, 2), st.text(TEXT, max_size=3)),
            "classes": st.one_of(st.text(TEXT, max_size=8), st.sampled_from(CLASSES)),
            "chunk_images": st.one_of(SIGNED, st.floats(), st.lists(st.integers(0, 9), max_size=2)),
            "fingerprint": st.one_of(st.text(TEXT, max_size=3), st.integers(0, 9)),
        },
    ),
    st.fixed_dictionaries(
        {},
        optional={
            name: st.tuples(
                st.lists(st.integers(0, 6), max_size=4),
                st.sampled_from(["u1", "<i8", "<f4", ">f4", "<u8", "S3", "?", "<c8"]),
                st.booleans(),
            )
            for name in ("images", "labels", "targets", "checksums", "names", "name_ends")
        },
    ),
)
def test_packed_headers(tmp_path_factory, attributes, arrays):
    """Files with valid checksums but arbitrary contents give a datastore or a UserError."""
    path = tmp_path_factory.mktemp("packed") / "x.h5"
    if EXAMPLES:
        path = tmp_path_factory.getbasetemp() / "packed.h5"
        path.unlink(missing_ok=True)
    packing.pack({"train": ArrayDatastore(pixels_of(0, 5, 4, 3), np.arange(5) % 3)}, path)
    with h5py.File(path, "r+") as file:
        group = file["train"]
        for name, (shape, dtype, chunked) in arrays.items():
            if name in group:
                del group[name]
            options = {"chunks": True} if chunked and shape and np.prod(shape) else {}
            group.create_dataset(name, shape, dtype, **options)
        for name, value in attributes.items():
            holder = group if name in group.attrs else file
            holder.attrs[name] = value
        try:
            file.attrs["sha256"] = pack_contents.content(file)
        except (UserError, TypeError, ValueError, OverflowError):
            pass  # verifying the checksum will raise this error, too
    parsers.open_and_verify(path)
