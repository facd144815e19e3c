"""Image files and arrays to pixels, uint8 (1, H, W) gray or (3, H, W) RGB."""

import os
import warnings

import numpy as np

from mpidl.data.datastore import shown
from mpidl.data.files import stamp
from mpidl.data.preprocess import AS_IT_IS
from mpidl.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "TIFF")
KINDS = {1: "gray", 3: "RGB"}


def decode(path, wanted=AS_IT_IS, expected=None, out=None):
    """(pixels of an image file, its Stamp); UserError naming the path.

    pixels: uint8 (1, H, W) or (3, H, W). expected: the shape that they must have; where a file has
    another, which its first bytes tell, nothing is decoded and the shape is returned in their
    place. Without it an image of more pixels than Pillow takes for safe is refused. out: an array
    of that shape, which is written to.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with open(path, "rb") as file:
            now = stamp(os.fstat(file.fileno()))
            with _opened(Image, file, expected is None) as image:
                if expected is not None:
                    shape = _shape(image, wanted)
                    if shape != expected:
                        return shape, now
                return pixels_of(image, wanted, out), now
    except UnidentifiedImageError:
        raise UserError(
            f"{shown(path)}: expected a PNG, JPEG, BMP or TIFF image, found something else or a "
            "damaged file"
        ) from None
    except FileNotFoundError:
        raise UserError(f"{shown(path)}: no such file any more") from None
    except Exception as e:  # Pillow raises many kinds for damaged files
        text = getattr(e, "strerror", None) or str(e) or type(e).__name__
        text = text.splitlines()[0]
        raise UserError(f"{shown(path)}: the image cannot be read: {text}") from None


def _opened(Image, file, strict):
    if not strict:
        return Image.open(file, formats=FORMATS)
    with warnings.catch_warnings():  # of this program's own: only before threads read
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(file, formats=FORMATS)


def _shape(image, wanted):
    """(C, H, W) that `pixels_of` will return."""
    return wanted.image_shape((1 if _is_gray(image) else 3, image.height, image.width))


def _is_gray(image):
    return image.mode in ("1", "L", "LA", "La", "F") or image.mode.startswith("I")


def pixels_of(image, wanted=AS_IT_IS, out=None):
    """uint8 (1, H, W) or (3, H, W) of an image of Pillow; UserError, ValueError where it is odd."""
    from PIL import Image

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
