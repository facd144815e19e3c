"""Test preprocessing of files and arrays: resizing, cropping and converting as Pillow does."""

import datafiles
import numpy as np
import pytest
from image_sets import grow, pixels_of, refusal, save
from PIL import Image

import mpidl as dl
from mpidl.data.transforms.preprocess import planes_of


def picture(seed, height, width, mode):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(pixels_of(seed, *shape))


def array_of(image):
    """Return the pixels of a picture as (C, H, W)."""
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


CASES = [
    ({}, lambda i: i),
    ({"size": (9, 14)}, lambda i: i.resize((14, 9), Image.Resampling.BILINEAR)),
    ({"colour": "gray"}, lambda i: i.convert("L")),
    ({"colour": "rgb"}, lambda i: i.convert("RGB")),
    ({"crop": (7, 8)}, lambda i: i.crop((6, 6, 14, 13))),
    (
        {"size": (30, 10), "cover": True, "crop": (30, 10)},
        lambda i: i.resize((30, 30), Image.Resampling.BILINEAR).crop((10, 0, 20, 30)),
    ),
    (
        {"size": (10, 11), "colour": "gray", "crop": (5, 5)},
        lambda i: i.convert("L").resize((11, 10), Image.Resampling.BILINEAR).crop((3, 2, 8, 7)),
    ),
]


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(
    "options, expected", CASES, ids=lambda c: str(c) if isinstance(c, dict) else "by Pillow"
)
def test_files_and_arrays_are_treated_as_pillow_does(options, expected, mode):
    image, preprocess = picture(1, 20, 20, mode), dl.Preprocess(**options)
    pixels, array = array_of(expected(image)), preprocess.of_picture(image)
    assert array.dtype == np.uint8 and np.array_equal(array, pixels)
    assert preprocess.image_shape(array_of(image).shape) == array.shape
    arrays = preprocess.of_arrays(array_of(image)[None])
    assert np.array_equal(arrays[0], pixels) and arrays.flags.c_contiguous


def test_floats_are_resized_as_bytes_are():
    pixels, gray = pixels_of(2, 3, 3, 40, 30), dl.Preprocess(size=(17, 19), colour="gray")
    as_bytes, as_floats = gray.of_arrays(pixels), gray.of_arrays(pixels.astype(np.float32))
    assert as_floats.dtype == np.float32 and as_floats.shape == (3, 1, 17, 19)
    # Bytes are rounded after the conversion to gray and after each resize.
    assert abs(as_bytes - as_floats).max() < 1.6


def test_a_constant_stays_constant_and_a_ramp_a_ramp():
    flat = np.full((1, 1, 50, 40), 97, np.uint8)
    assert (dl.Preprocess(size=(7, 90)).of_arrays(flat) == 97).all()
    ramp = np.broadcast_to(np.arange(64, dtype=np.float32), (1, 1, 5, 64))
    half = dl.Preprocess(size=(5, 32)).of_arrays(ramp)[0, 0, 0]
    assert np.allclose(half[2:-2], np.arange(32)[2:-2] * 2 + 0.5)


@pytest.mark.parametrize(
    "shape, size", [((20, 40), (10, 20)), ((33, 50), (10, 16)), ((5, 9), (7, 7))]
)
def test_cover_keeps_the_aspect_ratio(shape, size):
    height, width = dl.Preprocess(size=size, cover=True).resized(*shape)
    assert height >= size[0] and width >= size[1] and (height, width)[height > size[0]] in size
    assert abs(height / width - shape[0] / shape[1]) < 0.06


@pytest.mark.parametrize("mode, size", [("RGB", (5000, 4000)), ("L", (4, 3)), ("RGB", (1, 1))])
def test_planes_of_large_and_small_pictures(mode, size):
    """Planes are correct even if Pillow stores a large picture in several memory blocks."""
    image = Image.new(mode, size[::-1], (1, 2, 3) if mode == "RGB" else 1)
    image.putpixel((size[1] - 1, size[0] - 1), (7, 8, 9) if mode == "RGB" else 7)
    assert np.array_equal(planes_of(image), array_of(image))


def test_options_are_checked():
    for options, text in (
        ({"colour": "grey"}, "colour must be gray or rgb, got grey"),
        ({"size": 5}, "size: expected (height, width), got 5"),
        ({"crop": (0, 1)}, "crop: expected a height and a width of at least 1"),
    ):
        assert refusal(dl.Preprocess, **options).startswith(text)
    small = dl.Preprocess(crop=(9, 9))
    assert refusal(small.of_arrays, pixels_of(0, 1, 1, 8, 20)) == (
        "centre crop 9x9 (--centre-crop, or crop= in Python): expected images at least "
        "that large, found 8x20"
    )
    two = dl.Preprocess(colour="gray")
    assert refusal(two.of_arrays, pixels_of(0, 1, 2, 8, 8)) == (
        "colour gray (--colour, or colour= in Python): expected images of 1 or 3 channels, found 2"
    )


def test_a_preprocessed_set():
    images = pixels_of(3, 10, 3, 8, 12)
    store = dl.ArrayDatastore(images, np.arange(10))
    preprocess = dl.Preprocess(size=(6, 6), colour="gray")
    small = dl.data.preprocessed(store, preprocess)
    assert small.image_shape == (1, 6, 6) and len(small) == 10
    assert np.array_equal(small.read([7, 2]), preprocess.of_arrays(images[[7, 2]]))
    assert small.labels.tolist() == list(range(10))
    assert small.describe() == "arrays, gray, resized to 6x6: 10 images of 1x6x6 in 10 classes"
    other = dl.data.preprocessed(store, dl.Preprocess(size=(6, 6), colour="gray", crop=(5, 6)))
    assert len({store.fingerprint(), small.fingerprint(), other.fingerprint()}) == 3
    assert dl.data.preprocessed(store, dl.Preprocess()) is store
    assert dl.data.preprocessed(small, preprocess) is small
    text = refusal(dl.data.preprocessed, store, dl.Preprocess(crop=(9, 9)))
    assert text.startswith("arrays: 10 images of 3x8x12 in 10 classes: centre crop 9x9 (")


def test_datastores_know_how_their_images_were_preprocessed(tmp_path):
    grow(tmp_path)
    preprocess = dl.Preprocess(size=(3, 4), colour="rgb")
    folder = dl.ImageFolder(tmp_path, preprocess=preprocess)
    arrays = dl.ArrayDatastore(pixels_of(0, 9, 3, 6, 5), np.arange(9) % 3)
    for store in (
        folder,
        dl.data.preprocessed(dl.ImageFolder(tmp_path), preprocess),
        dl.data.preprocessed(arrays, preprocess),
        folder.subset([5, 3]).subset([1]),
        folder.split(0.5)[1],
        dl.data.NodeCache(folder),
        dl.data.combined(folder, np.arange(9.0)),
    ):
        assert store.preprocess == preprocess and store.image_shape == (3, 3, 4)
    # the result of a user's function cannot be described
    assert folder.transform(np.copy).preprocess is None
    assert dl.ImageFolder(tmp_path).preprocess is None


def test_two_files_are_preprocessed_once(tmp_path):
    """Images are preprocessed once. A second `cover`, after cropping, would enlarge them."""
    pixels = pixels_of(0, 6, 20, 30, 3)
    for part in ("train", "test"):
        datafiles.hdf5(tmp_path / f"{part}.h5", pixels, [0, 1, 2] * 2)
    preprocess = dl.Preprocess(size=(16, 16), cover=True, crop=(8, 8))
    expected = preprocess.of_arrays(pixels.transpose(0, 3, 1, 2))
    for store in dl.data.open_data(str(tmp_path), preprocess=preprocess):
        assert np.array_equal(store.read(range(6)), expected)


@pytest.mark.usefixtures("world")
def test_images_of_other_sizes_for_a_trained_network(tmp_path):
    """preprocess=net.preprocess reads a folder as in training. Errors suggest this argument."""
    for i in range(4):
        save(tmp_path / "ab"[i % 2] / f"{i}.png", pixels_of(i, 1, 8 + i, 9))
    store = dl.ImageFolder(tmp_path, preprocess=dl.Preprocess(size=(6, 5)))
    net = dl.Network([dl.Dense(2)], store.image_shape)
    assert net.preprocess is None
    options = dl.TrainingOptions(epochs=1, verbose="off")
    dl.train(net, store, options)
    assert net.preprocess == store.preprocess
    reopened = dl.ImageFolder(tmp_path, preprocess=net.preprocess)
    assert dl.evaluate(net, reopened) == dl.evaluate(net, store)
    text = refusal(dl.ImageFolder(tmp_path, preprocess=None).read, range(4))
    assert "for a trained network preprocess=net.preprocess" in text
