"""Test image files: PNG, JPEG, BMP and TIFF of every depth and mode, and refused files."""

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from image_sets import grow, pixels_of, refusal, save
from PIL import Image

import mpidl as dl
from mpidl.data import ImageFolder
from mpidl.files import open_regular, sha256_of_file


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".TIFF"])
@pytest.mark.parametrize("channels", [1, 3])
def test_lossless_formats_keep_their_pixels(tmp_path, suffix, channels):
    pixels = pixels_of(channels, channels, 7, 5)
    save(tmp_path / "c" / f"x{suffix}", pixels)
    store = ImageFolder(tmp_path)
    assert store.image_shape == pixels.shape and np.array_equal(store.read([0])[0], pixels)


def decoded(folder, image, name="x.tif", **options):
    """Save a picture as a file of this name and return the pixels that ImageFolder reads."""
    path = folder / "c" / name
    path.parent.mkdir(exist_ok=True)
    image.save(path, **options)
    pixels = ImageFolder(folder).read([0])[0]
    path.unlink()
    return pixels


@pytest.mark.parametrize(
    ("mode", "channels"),
    [("1", 1), ("L", 1), ("LA", 1), ("I;16", 1), ("P", 3), ("RGB", 3), ("RGBA", 3)],
)
def test_other_modes_are_converted(tmp_path, mode, channels):
    gray = np.zeros((4, 4), np.uint8)
    gray[1:3] = 255
    if mode == "I;16":
        image = Image.fromarray(gray.astype(np.uint16) << 8 | 17)
    else:
        image = Image.fromarray(gray).convert(mode)
    transparency = {"transparency": bytes([0, 128])} if mode == "P" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = decoded(tmp_path, image, "x.png", **transparency)
    assert np.array_equal(pixels, np.repeat(gray[None], channels, axis=0))


def test_depths_and_kinds_of_images(tmp_path):
    deep = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4) + 77
    for name in ("x.tif", "x.png"):  # the upper 8 of 16 bits
        assert np.array_equal(decoded(tmp_path, Image.fromarray(deep), name)[0], deep >> 8)
    gray = pixels_of(0, 4, 4)
    palette = Image.fromarray(gray).convert("P")  # palettes are RGB, even gray ones
    for name, channels in (("x.bmp", 1), ("x.tif", 3)):  # a BMP of all 256 grays is gray
        assert len(decoded(tmp_path, palette, name)) == channels
    black = decoded(tmp_path, Image.fromarray(gray > 128), "x.bmp")
    assert np.array_equal(black[0] > 0, gray > 128)
    cmyk = decoded(tmp_path, Image.new("CMYK", (3, 2), (0, 0, 0, 255)))
    assert len(cmyk) == 3 and not cmyk.any()
    cmyk = decoded(tmp_path, Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "x.jpg")
    assert cmyk.shape == (3, 8, 8)
    for dtype in (np.float32, np.int32):
        text = refusal(decoded, tmp_path, Image.fromarray(np.ones((4, 4), dtype)))
        assert text.startswith(f"{tmp_path}/c/x.tif: the image cannot be read: expected 8 or 16 b")


def test_the_orientation_of_a_camera_is_not_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    image = Image.fromarray(pixels_of(0, 8, 16, 3))
    assert decoded(tmp_path, image, "x.jpg", exif=exif).shape == (3, 8, 16)


def test_the_first_of_several_pages_is_read(tmp_path):
    pages = [Image.fromarray(pixels_of(i, 4, 4)) for i in (0, 1)]
    pixels = decoded(tmp_path, pages[0], save_all=True, append_images=pages[1:])
    assert np.array_equal(pixels[0], pixels_of(0, 4, 4))


def test_other_formats_are_refused_whatever_their_suffix(tmp_path):
    (tmp_path / "c").mkdir()
    Image.fromarray(pixels_of(0, 4, 4)).save(tmp_path / "c" / "x.png", format="GIF")
    text = refusal(ImageFolder, tmp_path)
    assert text.startswith(f"{tmp_path}/c/x.png: expected a PNG, JPEG, BMP or TIFF image")


@pytest.mark.filterwarnings("ignore")  # Pillow's warning about the size
def test_decompression_bombs(tmp_path, monkeypatch):
    """Images with too many pixels are refused, by Pillow's limit or by the size in the header."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for side in (40, 60):  # 1.6 times the limit, and more than twice
        bomb = save(tmp_path / "set" / "a" / "0.png", np.zeros((1, side, side), np.uint8))
        text = refusal(ImageFolder, tmp_path / "set")
        assert text.startswith(f"{bomb}: the image cannot be read: ") and "limit" in text
        assert "decompression bomb" in text
    bomb.unlink()
    bomb.parent.rmdir()
    grow(tmp_path / "set")
    bomb = save(tmp_path / "set" / "dog" / "1.png", np.zeros((1, 40, 40), np.uint8))
    store = ImageFolder(tmp_path / "set")
    conversions = []
    monkeypatch.setattr(Image.Image, "convert", lambda *a: conversions.append(1))
    text = refusal(store.read, [store.files.index("dog/1.png")])
    assert "found 40x40 gray" in text and str(bomb) in text and not conversions


def test_a_tiff_that_lacks_strips_is_refused(tmp_path):
    """A TIFF file with missing strips is an error, although Pillow returns black pixels."""
    path = save(tmp_path / "c" / "x.tif", pixels_of(0, 3, 6, 5))
    content = path.read_bytes()
    tag = b"\x01\x01\x04\x00\x01\x00\x00\x00"  # tag 257, the height: one 32-bit number
    place = content.index(tag) + len(tag)
    path.write_bytes(content[:place] + (600).to_bytes(2, "little") + content[place + 2 :])
    expected = "the image cannot be read: expected 5x600 pixels, found 1% of them: it is damaged"
    assert refusal(ImageFolder, tmp_path) == f"{path}: {expected}"


def test_images_of_any_size_are_resized_and_converted(tmp_path):
    save(tmp_path / "a" / "0.png", pixels_of(0, 3, 20, 30))
    save(tmp_path / "b" / "1.png", pixels_of(1, 1, 9, 9))

    def resized(**options):
        return ImageFolder(tmp_path, preprocess=dl.Preprocess(size=(6, 8), **options))

    store = resized(colour="rgb")
    assert store.image_shape == (3, 6, 8) and store.read([0, 1]).shape == (2, 3, 6, 8)
    picture = Image.open(tmp_path / "a" / "0.png").resize((8, 6), Image.Resampling.BILINEAR)
    assert np.array_equal(store.read([0])[0], np.asarray(picture).transpose(2, 0, 1))
    text = refusal(ImageFolder, tmp_path, preprocess=dl.Preprocess(crop=(40, 9)))
    assert text.startswith(f"{tmp_path}/a/0.png: centre crop 40x9 (--centre-crop, or crop= in Py")
    grays = resized(colour="gray")
    assert grays.image_shape == (1, 6, 8) and grays.read([1, 0]).shape == (2, 1, 6, 8)
    assert len({s.fingerprint() for s in (store, grays, resized())}) == 3


def test_a_file_that_changes_or_vanishes_during_the_run(tmp_path):
    grow(tmp_path)
    store = ImageFolder(tmp_path)
    path = tmp_path / "cat" / "1.png"
    save(path, pixels_of(9, 1, 6, 5))
    text = refusal(store.read, [1])
    assert text.startswith(f"{path}: the file has changed since the run began (")
    path.unlink()
    assert refusal(store.read, [1]) == f"{path}: the file no longer exists"
    assert len(store.read([0, 2])) == 2


@pytest.mark.timeout(60)
def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    """Images, masks, encoded images to pack, and files of other formats and models."""
    grow(tmp_path / "set")
    pipe = tmp_path / "set" / "dog" / "1.png"
    pipe.unlink()
    os.mkfifo(pipe)
    store, text = ImageFolder(tmp_path / "set"), "expected a file, found a device or a pipe"
    expected = f"{pipe}: the image cannot be read: {text}"
    assert refusal(store.read, [0, 4]) == expected
    assert refusal(store.read_encoded, [0, 4]) == expected
    masked = dl.data.combined(store, store, pixel_labels=True)
    assert refusal(masked.targets, [4]) == expected
    for images in ("decoded", "encoded"):
        path = tmp_path / f"{images}.h5"
        assert refusal(dl.data.pack, {"train": store}, path, images=images).startswith(f"{pipe}:")
    readers = dl.data.npz_file, dl.data.mat_file, dl.data.HDF5Datastore, dl.data.read_idx
    for read in (*readers, dl.data.ImageTable):
        assert refusal(read, pipe) == f"{pipe}: the file cannot be read: {text}"
    assert refusal(dl.load_model, pipe).endswith(text)
    assert refusal(sha256_of_file, pipe).endswith(text)
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    assert refusal(dl.history, tmp_path / "run").endswith(text)
    bad_images = dl.data.BadImages()
    bad_images.search(store, None)
    assert bad_images.reasons == {4: expected}


def test_a_leased_file_is_read_when_its_holder_gives_it_back(tmp_path):
    """File servers take leases, which an open that does not wait cannot break."""
    path = tmp_path / "leased"
    path.write_bytes(b"content")
    program = (
        "import fcntl, signal, sys\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])\n"
        "print('leased', flush=True)\n"
        "signal.sigwait([signal.SIGIO])\n"
        "fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)\n"
    )
    command = [sys.executable, "-c", program, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as holder:
        if not holder.stdout.readline():
            pytest.skip(f"the file system has no leases: {holder.stderr.read().decode()[-80:]}")
        descriptor, status = open_regular(path)
    with open(descriptor, "rb") as file:
        assert os.get_blocking(descriptor) and status.st_size == 7
        assert file.read() == b"content"
