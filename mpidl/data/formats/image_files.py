"""Image files and arrays to pixels, uint8 (1, H, W) gray or (3, H, W) RGB."""

import functools
import io
import os
import warnings

import numpy as np

from mpidl.data.transforms.preprocess import AS_IT_IS, planes_of
from mpidl.errors import UserError
from mpidl.files import stamp
from mpidl.text import printable

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "TIFF")
JPEG, LARGEST = b"\xff\xd8\xff", 1 << 30  # how such a file begins; bytes of any file
CHANNELS = {"L": 1, "RGB": 3}  # of modes that need no conversion
KEPT = 4  # images whose memory Pillow keeps for the next ones: new pages cost a third of decoding
KINDS = {1: "gray", 3: "RGB"}


def decode(path, wanted=AS_IT_IS, expected=None, out=None):
    """(pixels of an image file, its Stamp); UserError naming the path.

    pixels: uint8 (1, H, W) or (3, H, W). expected: the shape that they must have; where a file has
    another, which its first bytes tell, nothing is decoded and the shape is returned in their
    place. Without it an image of more pixels than Pillow takes for safe is refused. out: an array
    of that shape, which is written to.
    """
    Image, JpegImageFile, UnidentifiedImageError = _pillow()
    try:
        content, now = _read(path)
        if expected is not None and not wanted and content.startswith(JPEG):
            # what Image.open comes to, after looking for other formats
            image = JpegImageFile(io.BytesIO(content))
            if (CHANNELS.get(image.mode), *image.size[::-1]) == expected:
                return planes_of(image, out), now
        else:
            image = _opened(Image, io.BytesIO(content), expected is None)
        if expected is not None:
            shape = _shape(image, wanted)
            if shape != expected:
                return shape, now
        return pixels_of(image, wanted, out), now
    except UnidentifiedImageError:
        raise UserError(
            f"{printable(path)}: expected a PNG, JPEG, BMP or TIFF image, found something else or "
            "a damaged file"
        ) from None
    except FileNotFoundError:
        raise UserError(f"{printable(path)}: no such file any more") from None
    except UserError as e:  # of what it is to be brought to
        raise UserError(f"{printable(path)}: {e}") from None
    except Exception as e:  # Pillow raises many kinds for damaged files
        text = getattr(e, "strerror", None) or str(e) or type(e).__name__
        text = text.splitlines()[0]
        raise UserError(f"{printable(path)}: the image cannot be read: {text}") from None


def _read(path):
    """(content, Stamp) of a file, by as few calls of the system as it takes."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        now = stamp(os.fstat(handle))
        if now.size > LARGEST:
            raise ValueError(f"expected at most {LARGEST >> 30} GiB, found {now.size} bytes")
        content = os.read(handle, now.size)
        while len(content) < now.size and (more := os.read(handle, now.size - len(content))):
            content += more
    finally:
        os.close(handle)
    return content, now


@functools.cache
def _pillow():
    """What is used of Pillow, which is imported when a file is first decoded."""
    from PIL import Image, UnidentifiedImageError
    from PIL.JpegImagePlugin import JpegImageFile

    if hasattr(Image.core, "set_blocks_max"):
        Image.core.set_blocks_max(max(KEPT, Image.core.get_blocks_max()))
    return Image, JpegImageFile, UnidentifiedImageError


def _opened(Image, file, strict):
    if not strict:
        return Image.open(file, formats=FORMATS)
    with warnings.catch_warnings():  # of this program's own: only before threads read
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(file, formats=FORMATS)


def _shape(image, wanted):
    """(C, H, W) that `pixels_of` will return."""
    if not wanted:
        return (1 if _is_gray(image) else 3, *image.size[::-1])
    return wanted.image_shape((1 if _is_gray(image) else 3, image.height, image.width))


def _is_gray(image):
    return image.mode in ("1", "L", "LA", "La", "F") or image.mode.startswith("I")


def pixels_of(image, wanted=AS_IT_IS, out=None):
    """uint8 (1, H, W) or (3, H, W) of an image of Pillow; UserError, ValueError where it is odd."""
    from PIL import Image

    if not wanted and image.mode in CHANNELS:
        return planes_of(image, out)
    gray = _is_gray(image)
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise ValueError(f"expected 8 or 16 bits a pixel, found 32 (mode {image.mode})")
    if image.mode.startswith("I"):  # 16 bits, which convert() would clip, not scale
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("L", "RGB"):
        pass  # convert() would copy it
    elif gray:
        image = image.convert("L")
    elif image.mode in ("P", "PA"):  # by way of RGBA, or Pillow warns of a palette with alpha
        image = image.convert("RGBA").convert("RGB")
    else:
        image = image.convert("RGB")
    return wanted.of_picture(image, out)
