"""Test windows of TIFF files: layouts, compressions, and damaged files."""

import struct
import sys

import numpy as np
import pytest
import tifffile
from image_sets import pixels_of, refusal

from mpidl.data.formats import image_files
from mpidl.tiles import tiff

SHAPE = (75, 101)
LAYOUTS = {
    "strips": {"rowsperstrip": 16},
    "one strip": {"rowsperstrip": 75},
    "tiles": {"tile": (32, 48)},
    "deflate": {"tile": (32, 32), "compression": "zlib", "predictor": True},
    "lzw": {"rowsperstrip": 7, "compression": "lzw"},
    "motorola": {"tile": (32, 32), "byteorder": ">"},
    "bigtiff": {"tile": (32, 32), "bigtiff": True},
}
WINDOWS = [(slice(0, 75), slice(0, 101)), (slice(15, 17), slice(31, 50)), (slice(74, 75),) * 2]


def write(path, samples=1, dtype=np.uint8, planar=False, **options):
    """Write an image (75, 101, samples); 2 and 4 samples include alpha."""
    high = 256 if dtype == np.uint8 else 65536
    pixels = np.random.default_rng(samples).integers(0, high, (*SHAPE, samples), dtype=dtype)
    if samples in (2, 4):
        options["extrasamples"] = ["unassalpha"]
    if planar:
        pixels, options["planarconfig"] = np.moveaxis(pixels, -1, 0), "separate"
    options |= {"photometric": "rgb" if samples > 2 else "minisblack"}
    tifffile.imwrite(path, pixels[..., 0] if samples == 1 else pixels, **options)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_windows_have_the_pixels_that_pillow_reads(layout, samples, tmp_path):
    path = write(tmp_path / "image.tif", samples, **LAYOUTS[layout])
    expected = image_files.decode(path)[0]
    file_layout = tiff.layout_of(path)
    assert file_layout.shape == expected.shape == (1 if samples < 3 else 3, *SHAPE)
    for rows, columns in WINDOWS:
        window = tiff.read_window(path, file_layout, rows, columns)
        assert window.dtype == np.uint8
        np.testing.assert_array_equal(window, expected[:, rows, columns])


@pytest.mark.parametrize("layout", ["strips", "tiles"])
def test_planes_and_16_bits(layout, tmp_path):
    path = write(tmp_path / "image.tif", 3, np.uint16, planar=True, **LAYOUTS[layout])
    expected = (tifffile.imread(path) >> 8).astype(np.uint8)
    file_layout = tiff.layout_of(path)
    assert file_layout.is_planar and file_layout.shape == (3, *SHAPE)
    for rows, columns in WINDOWS:
        window = tiff.read_window(path, file_layout, rows, columns)
        np.testing.assert_array_equal(window, expected[:, rows, columns])


def test_only_the_tiles_of_a_window_are_read(tmp_path):
    """Negative control: a window that includes the damaged tile raises an error."""
    path = write(tmp_path / "image.tif", 1, tile=(32, 48), compression="zlib")
    with tifffile.TiffFile(path) as file:
        offset = file.pages[0].dataoffsets[0]
    content = bytearray(path.read_bytes())
    content[offset : offset + 20] = bytes(20)
    path.write_bytes(content)
    layout = tiff.layout_of(path)
    tiff.read_window(path, layout, slice(32, 75), slice(0, 101))
    text = refusal(tiff.read_window, path, layout, slice(31, 75), slice(0, 101))
    assert text.startswith(f"{path}: ")


def test_other_files_are_decoded_as_a_whole(tmp_path, monkeypatch):
    pixels = pixels_of(0, *SHAPE)
    for name, array, options in (
        ("white", pixels, {"photometric": "miniswhite"}),
        ("float", pixels.astype(np.float32), {}),
        ("palette", pixels, {"photometric": "palette", "colormap": np.zeros((3, 256), np.uint16)}),
    ):
        tifffile.imwrite(tmp_path / f"{name}.tif", array, **options)
        assert tiff.layout_of(tmp_path / f"{name}.tif") is None
    (tmp_path / "text.tif").write_text("text")
    assert tiff.layout_of(tmp_path / "text.tif") is None
    path = write(tmp_path / "gray.tif")
    assert tiff.layout_of(path) is not None
    monkeypatch.setitem(sys.modules, "tifffile", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert tiff.layout_of(path) is None


def test_damaged_headers(tmp_path):
    """Each file is refused in one line that names the file."""
    content = write(tmp_path / "whole.tif", 1, tile=(32, 32)).read_bytes()
    with tifffile.TiffFile(tmp_path / "whole.tif") as file:
        tags = {tag.name: tag for tag in file.pages[0].tags}
    wide = bytearray(content)
    struct.pack_into("<I", wide, tags["ImageWidth"].valueoffset, 1 << 30)
    crowded = bytearray(content)
    struct.pack_into("<I", crowded, tags["TileOffsets"].offset + 4, 1 << 30)
    for name, damaged in (
        ("empty", content[:4]),
        ("short", content[:100]),
        ("wide", bytes(wide)),
        ("many", bytes(crowded)),
    ):
        path = tmp_path / f"{name}.tif"
        path.write_bytes(damaged)
        text = refusal(tiff.layout_of, path)
        assert text.startswith(str(path)), text
    missing = tmp_path / "missing.tif"
    assert refusal(tiff.layout_of, missing) == f"{missing}: no such file"
