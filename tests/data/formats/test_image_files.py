"""Image files: PNG, JPEG, BMP and TIFF, of any depth and kind, and what is refused."""

import os
import warnings

import numpy as np
import pytest
from image_sets import grow, pixels_of, refusal, save
from PIL import Image

import mpidl as dl
from mpidl.data import ImageFolder


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".TIFF"])
@pytest.mark.parametrize("channels", [1, 3])
def test_lossless_formats_give_their_pixels_back(tmp_path, suffix, channels):
    pixels = pixels_of(channels, channels, 7, 5)
    save(tmp_path / "c" / f"x{suffix}", pixels)
    store = ImageFolder(tmp_path)
    assert store.image_shape == pixels.shape and np.array_equal(store.read([0])[0], pixels)


def saved(folder, image, name="x.tif", **options):
    (folder / "c").mkdir(exist_ok=True)
    image.save(folder / "c" / name, **options)
    return ImageFolder(folder).read([0])[0]


def test_depths_and_kinds_of_images(tmp_path):
    deep = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4) + 77
    for name in ("x.tif", "y.png"):  # 16 bits: the high 8
        assert np.array_equal(saved(tmp_path, Image.fromarray(deep), name)[0], deep >> 8)
        os.unlink(tmp_path / "c" / name)
    gray = pixels_of(0, 4, 4)
    palette = Image.fromarray(gray).convert("P")  # a palette is RGB, were it of grays alone
    for name in ("x.bmp", "y.tif"):
        expected = 1 if name == "x.bmp" else 3  # a BMP of all 256 grays says that it is gray
        assert len(saved(tmp_path, palette, name)) == expected
        os.unlink(tmp_path / "c" / name)
    black = Image.fromarray(gray > 128)
    assert np.array_equal(saved(tmp_path, black, "x.bmp")[0] > 0, gray > 128)
    os.unlink(tmp_path / "c" / "x.bmp")
    cmyk = Image.new("CMYK", (3, 2), (0, 0, 0, 255))
    assert not saved(tmp_path, cmyk).any() and len(saved(tmp_path, cmyk)) == 3
    for odd in (np.ones((4, 4), np.float32), np.ones((4, 4), np.int32)):
        Image.fromarray(odd).save(tmp_path / "c" / "x.tif")
        text = refusal(ImageFolder, tmp_path)
        assert text.startswith(f"{tmp_path}/c/x.tif: the image cannot be read: expected 8 or 16 b")


def test_the_orientation_of_a_camera_is_not_applied(tmp_path):
    pixels = pixels_of(0, 8, 16, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert saved(tmp_path, Image.fromarray(pixels), "x.jpg", exif=exif).shape == (3, 8, 16)


def test_of_several_pages_the_first(tmp_path):
    pages = [Image.fromarray(pixels_of(i, 4, 4)) for i in (0, 1)]
    found = saved(tmp_path, pages[0], save_all=True, append_images=pages[1:])
    assert np.array_equal(found[0], pixels_of(0, 4, 4))


def test_other_formats_are_refused_whatever_they_are_called(tmp_path):
    (tmp_path / "c").mkdir()
    Image.fromarray(pixels_of(0, 4, 4)).save(tmp_path / "c" / "x.png", format="GIF")
    text = refusal(ImageFolder, tmp_path)
    assert text.startswith(f"{tmp_path}/c/x.png: expected a PNG, JPEG, BMP or TIFF image")


def test_decompression_bombs(tmp_path, monkeypatch):
    """The first image of a set by Pillow's limit; another by its size, before it is decoded."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for side in (40, 60):  # 1.6 times the limit, and more than twice
        bomb = save(tmp_path / "set" / "a" / "0.png", np.zeros((1, side, side), np.uint8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = refusal(ImageFolder, tmp_path / "set")
        assert text.startswith(f"{bomb}: the image cannot be read: ") and "limit" in text
        assert "decompression bomb" in text
    bomb.unlink()
    bomb.parent.rmdir()
    grow(tmp_path / "set")
    bomb = save(tmp_path / "set" / "dog" / "1.png", np.zeros((1, 40, 40), np.uint8))
    store = ImageFolder(tmp_path / "set")
    decoded = []
    monkeypatch.setattr(Image.Image, "convert", lambda *a: decoded.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = refusal(store.read, [store.files.index("dog/1.png")])
    assert "found 40x40 gray" in text and str(bomb) in text and not decoded


def test_images_of_any_size_are_resized_and_converted(tmp_path):
    save(tmp_path / "a" / "0.png", pixels_of(0, 3, 20, 30))
    save(tmp_path / "b" / "1.png", pixels_of(1, 1, 9, 9))

    def made(**how):
        return ImageFolder(tmp_path, preprocess=dl.Preprocess(size=(6, 8), **how))

    store = made(colour="rgb")
    assert store.image_shape == (3, 6, 8) and store.read([0, 1]).shape == (2, 3, 6, 8)
    picture = Image.open(tmp_path / "a" / "0.png").resize((8, 6), Image.Resampling.BILINEAR)
    assert np.array_equal(store.read([0])[0], np.asarray(picture).transpose(2, 0, 1))
    text = refusal(ImageFolder, tmp_path, preprocess=dl.Preprocess(crop=(40, 9)))
    assert text.startswith(f"{tmp_path}/a/0.png: centre crop 40x9 (--centre-crop, or crop= in Py")
    grays = made(colour="gray")
    assert grays.image_shape == (1, 6, 8) and grays.read([1, 0]).shape == (2, 1, 6, 8)
    prints = {s.fingerprint() for s in (store, grays, made())}
    assert len(prints) == 3


def test_a_file_that_changes_or_vanishes_while_it_is_used(tmp_path):
    grow(tmp_path)
    store = ImageFolder(tmp_path)
    path = tmp_path / "cat" / "1.png"
    save(path, pixels_of(9, 1, 6, 5))
    text = refusal(store.read, [1])
    assert text.startswith(f"{path}: the file has changed since the run began (")
    path.unlink()
    assert refusal(store.read, [1]) == f"{path}: no such file any more"
    assert len(store.read([0, 2])) == 2
