"""Decode image files to uint8 pixels, (1, H, W) for gray and (3, H, W) for RGB images."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpidl.data.transforms.preprocess import AS_IT_IS, Preprocess, planes_of
from mpidl.errors import UnreadableImage, UserError
from mpidl.files import Stamp, open_regular, reason, stamp
from mpidl.text import printable

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "TIFF")
JPEG = b"\xff\xd8\xff"  # first bytes of a JPEG file
MAX_BYTES = 1 << 30  # maximum size of a file
CHANNELS = {"L": 1, "RGB": 3}  # number of channels of the Pillow modes that need no conversion
MEMORY_BLOCKS = 4  # blocks that Pillow reuses; new blocks would take 1/3 of the decoding time
KINDS = {1: "gray", 3: "RGB"}


def decode(
    path: str | os.PathLike[str],
    preprocess: Preprocess = AS_IT_IS,
    expected: tuple[int, ...] | None = None,
    out: np.ndarray | None = None,
    content: bytes | None = None,
) -> tuple[Any, Stamp | None]:
    """Decode a PNG, JPEG, BMP or TIFF file, or its `content`.

    Return pixels, uint8 (1, H, W) or (3, H, W), after `preprocess`, and the Stamp of the file, None
    for `content`. If the shape in the header differs from `expected`, nothing is decoded, and the
    shape is returned instead of pixels. Without `expected`, an image is rejected if it has more
    pixels than Pillow considers safe. Pixels are written to `out` if it is given. Raises UserError,
    which names the file, if it is missing, damaged, or of another format.
    """
    Image, JpegImageFile = _pillow()
    with _naming(path):
        now = None
        if content is None:
            content, now = _content_of(path)
        if expected is not None and not preprocess and content.startswith(JPEG):
            # This is faster than Image.open, which would try other formats first.
            image = JpegImageFile(io.BytesIO(content))
            if (CHANNELS.get(image.mode), *image.size[::-1]) == expected:
                return planes_of(image, out), now
        else:
            image = _opened(Image, io.BytesIO(content), expected is None)
            _check_parts(image)
        if expected is not None:
            shape = _shape(image, preprocess)
            if shape != expected:
                return shape, now
        return pixels_of(image, preprocess, out), now


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert any error in the `with` block to a UserError that names the image file.

    The error is an UnreadableImage unless the Preprocess rejects the image.
    """
    try:
        yield
    except FileNotFoundError:
        text = "the file no longer exists"
    except UserError as e:  # the Preprocess rejects the image
        raise UserError(f"{printable(path)}: {e}") from None
    except Exception as e:  # Pillow raises exceptions of many types for damaged files
        from PIL import UnidentifiedImageError

        text = f"the image cannot be read: {reason(e).splitlines()[0]}"
        if isinstance(e, UnidentifiedImageError):
            text = "expected a PNG, JPEG, BMP or TIFF image, found another format or a damaged file"
    else:
        return
    raise UnreadableImage(f"{printable(path)}: {text}") from None


def read_file(path: str) -> tuple[bytes, Stamp]:
    """Return the content and the Stamp of an image file without decoding it.

    Raises UserError if the file is missing, cannot be read, or has more than `MAX_BYTES` bytes.
    """
    with _naming(path):
        return _content_of(path)


def _content_of(path):
    """Read a file with as few system calls as possible, and return (content, Stamp)."""
    descriptor, status = open_regular(path)
    try:
        now = stamp(status)
        if now.size > MAX_BYTES:
            raise ValueError(f"expected at most {MAX_BYTES >> 30} GiB, found {now.size} bytes")
        content = os.read(descriptor, now.size)
        while len(content) < now.size and (rest := os.read(descriptor, now.size - len(content))):
            content += rest
    finally:
        os.close(descriptor)
    return content, now


@functools.cache
def _pillow():
    """Import Pillow, and return the classes that `decode` uses. Called for the first file."""
    from PIL import Image
    from PIL.JpegImagePlugin import JpegImageFile

    if hasattr(Image.core, "set_blocks_max"):
        Image.core.set_blocks_max(max(MEMORY_BLOCKS, Image.core.get_blocks_max()))
    return Image, JpegImageFile


def check_image(content: bytes, name: str, shape: tuple[int, ...]) -> None:
    """Check that the content of an image file can be decoded.

    Raise UserError if it cannot. A shape that differs from the expected one is not an error.
    """
    pixels, _ = decode(name, expected=shape, content=content)
    if isinstance(pixels, tuple):
        decode(name, expected=pixels, content=content)


def _opened(Image, file, strict):
    """Open an image. If `strict`, reject images with more pixels than Pillow considers safe."""
    Image.preinit()  # once: imports the formats, which `open` would otherwise do in the block
    if not strict:
        return Image.open(file, formats=FORMATS)
    with warnings.catch_warnings():  # not thread-safe, so only before prefetch threads start
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(file, formats=FORMATS)


def _check_parts(image):
    """Raise ValueError if the file lacks a part of the image. Pillow would leave it black."""
    boxes = [part[1] for part in image.tile]  # (left, top, right, bottom)
    area = sum((right - left) * (bottom - top) for left, top, right, bottom in boxes)
    if area < image.width * image.height:
        percent = int(100 * area / (image.width * image.height))
        raise ValueError(
            f"expected {image.width}x{image.height} pixels, found {percent}% of them: it is damaged"
        )


def _shape(image, preprocess):
    """Return the shape (C, H, W) that `pixels_of` would return, without decoding the image."""
    if not preprocess:
        return (1 if _is_gray(image) else 3, *image.size[::-1])
    return preprocess.image_shape((1 if _is_gray(image) else 3, image.height, image.width))


def _is_gray(image):
    return image.mode in ("1", "L", "LA", "La", "F") or image.mode.startswith("I")


def pixels_of(image, preprocess=AS_IT_IS, out=None):
    """Preprocess a Pillow image, and return its pixels, uint8 (1, H, W) or (3, H, W).

    If `out` is given, the result is written to it. Raises UserError if the Preprocess cannot be
    applied to an image of this size or colour. Raises ValueError if the image has 32 bits per
    pixel.
    """
    from PIL import Image

    if not preprocess and image.mode in CHANNELS:
        return planes_of(image, out)
    gray = _is_gray(image)
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise ValueError(f"expected 8 or 16 bits per pixel, found 32 (mode {image.mode})")
    if image.mode.startswith("I"):  # convert() would clip 16-bit pixels instead of scaling them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("L", "RGB"):
        pass  # convert() would make a copy
    elif gray:
        image = image.convert("L")
    elif image.mode in ("P", "PA"):  # via RGBA, because Pillow warns about a palette with alpha
        image = image.convert("RGBA").convert("RGB")
    else:
        image = image.convert("RGB")
    return preprocess.of_picture(image, out)
