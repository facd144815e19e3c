"""Read windows of TIFF files with the library tifffile.

Windows are read from gray and RGB files with 8 or 16 bits, in strips or tiles. All other files, and
all files if tifffile is not installed, are decoded as a whole by Pillow.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpidl.data.paths import reading
from mpidl.errors import UserError
from mpidl.files import open_regular
from mpidl.text import printable

SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # also of BigTIFF
MAX_SEGMENT = 1 << 25  # bytes of a decoded strip or tile, which windows decode again and again
MIN_IS_BLACK, RGB = 1, 2  # values of the tag PhotometricInterpretation
ALPHA, PREMULTIPLIED = 2, 1  # values of the tag ExtraSamples


class Layout(NamedTuple):
    """The segments (strips or tiles) of the first page of a TIFF file.

    `shape` is the shape (C, H, W) without alpha. `segment` is the size (h, w) of a segment. If the
    channels are stored as planes, each plane has its own segments.
    """

    shape: tuple[int, int, int]
    segment: tuple[int, int]
    is_planar: bool


def layout_of(path: str) -> Layout | None:
    """Return the layout of a TIFF file, or None if it has to be decoded as a whole.

    Raises UserError if the header is damaged.
    """
    with reading(path):
        descriptor, _ = open_regular(path)
        try:
            head = os.read(descriptor, 4)
        finally:
            os.close(descriptor)
    if head not in SIGNATURES or importlib.util.find_spec("tifffile") is None:
        return None
    with reading(path), _first_page(path) as page:
        return _layout(path, page)


@contextlib.contextmanager
def _first_page(path: str) -> Iterator[Any]:
    with _library().TiffFile(path) as file:
        yield file.pages[0]


@functools.cache
def _library():
    """Import tifffile, whose log of damaged files would repeat the error."""
    import tifffile

    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    return tifffile


def _layout(path, page):
    """Return the Layout of a page, or None. Raises UserError if segments are missing."""
    samples, planar = int(page.samplesperpixel), int(page.planarconfig) == 2
    extra = tuple(int(kind) for kind in page.extrasamples or ())
    colours = {MIN_IS_BLACK: 1, RGB: 3}.get(int(page.photometric))
    is_integer = page.dtype in (np.uint8, np.uint16) and page.bitspersample in (8, 16)
    if colours is None or not is_integer or PREMULTIPLIED in extra or page.imagedepth != 1:
        return None
    if len(extra) != samples - colours or any(kind not in (0, ALPHA) for kind in extra):
        return None
    channels = samples - extra.count(ALPHA)
    if channels != samples and extra[-1] != ALPHA:
        return None
    height, width = int(page.imagelength), int(page.imagewidth)
    segment = height if page.rowsperstrip is None else min(int(page.rowsperstrip), height), width
    if page.is_tiled:
        segment = int(page.tilelength), int(page.tilewidth)
    if min(height, width, *segment) < 1:
        raise UserError(f"{printable(path)}: expected pixels, found {height}x{width}")
    size = segment[0] * segment[1] * (1 if planar else samples) * page.dtype.itemsize
    if size > MAX_SEGMENT:
        return None
    layout = Layout((channels, height, width), segment, planar)
    down, across = _counts(layout)
    count, expected = len(page.dataoffsets), down * across * (samples if planar else 1)
    if count != expected or len(page.databytecounts) != expected:
        raise UserError(
            f"{printable(path)}: expected {expected} strips or tiles of {height}x{width} pixels, "
            f"found {count}: the file is damaged"
        )
    return layout


def _counts(layout):
    """Return the number of segments down and across."""
    return tuple(-(-n // m) for n, m in zip(layout.shape[1:], layout.segment, strict=True))


def read_window(path: str, layout: Layout, rows: slice, columns: slice) -> np.ndarray:
    """Read the pixels (C, h, w) of a window, uint8; 16-bit pixels keep their high 8 bits.

    Segments without data, which some programs do not write, are 0. Raises UserError, which names
    the file, if it is damaged.
    """
    out = np.zeros((layout.shape[0], rows.stop - rows.start, columns.stop - columns.start), "u1")
    down, across = _counts(layout)
    height, width = layout.segment
    with reading(path), _first_page(path) as page:
        if _layout(path, page) != layout:
            raise ValueError("the file has changed")
        for plane in range(layout.shape[0] if layout.is_planar else 1):
            part = out[plane : plane + 1] if layout.is_planar else out
            for row in range(rows.start // height, -(-rows.stop // height)):
                for column in range(columns.start // width, -(-columns.stop // width)):
                    number = (plane * down + row) * across + column
                    pixels = _segment(page, number)
                    if pixels is None:
                        continue
                    origin = row * height, column * width
                    inside = [n - o for n, o in zip(layout.shape[1:], origin, strict=True)]
                    if any(np.minimum(inside, layout.segment) > pixels.shape[:2]):
                        raise ValueError(f"strip or tile {number} lacks pixels")
                    _copy(pixels, origin, part, (rows, columns))
    return out


def _segment(page, number):
    """Return the decoded pixels (h, w, samples) of a segment; None if the file has no data."""
    offset, count = page.dataoffsets[number], page.databytecounts[number]
    if not count:
        return None
    if count > 2 * MAX_SEGMENT:
        raise ValueError(f"expected strips or tiles of at most {MAX_SEGMENT} bytes, found {count}")
    handle = page.parent.filehandle
    handle.seek(offset)
    content = handle.read(count)
    if len(content) != count:
        raise ValueError(f"expected {count} bytes of strip or tile {number}, found {len(content)}")
    pixels = page.decode(content, number, jpegtables=page.jpegtables)[0]
    if pixels is None:
        return None
    return pixels[0] >> 8 if pixels.dtype == np.uint16 else pixels[0]


def _copy(pixels, origin, out, window):
    """Copy the part of a segment (h, w, samples) at `origin` that is in a window to `out`."""
    sources, targets = [], []
    for start, extent, span in zip(origin, pixels.shape[:2], window, strict=True):
        first, stop = max(start, span.start), min(start + extent, span.stop)
        sources.append(slice(first - start, stop - start))
        targets.append(slice(first - span.start, stop - span.start))
    part = pixels[tuple(sources)][:, :, : len(out)]
    out[:, targets[0], targets[1]] = np.moveaxis(part, -1, 0)
