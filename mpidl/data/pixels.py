"""Image files and arrays to pixels, uint8 (1, H, W) gray or (3, H, W) RGB."""

import os
import warnings
from typing import NamedTuple

import numpy as np

from mpidl.data.datastore import shown
from mpidl.data.files import stamp
from mpidl.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "TIFF")
KINDS = {1: "gray", 3: "RGB"}
COLOURS = {"gray": 1, "rgb": 3}


class As(NamedTuple):
    """What images are made: size, (H, W), and colour, "gray" or "rgb"; None leaves it as it is."""

    size: tuple | None = None
    colour: str | None = None


AS_IT_IS = As()


def decode(path, wanted=AS_IT_IS, expected=None):
    """(pixels of an image file, its Stamp); UserError naming the path.

    pixels: uint8 (1, H, W) or (3, H, W). expected: the shape that they must have; where a file has
    another, which its first bytes tell, nothing is decoded and the shape is returned in their
    place. Without it an image of more pixels than Pillow takes for safe is refused.
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
                return pixels_of(image, wanted), now
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
    channels = COLOURS.get(wanted.colour) or (1 if _is_gray(image) else 3)
    return (channels, *(wanted.size or (image.height, image.width)))


def _is_gray(image):
    return image.mode in ("1", "L", "LA", "La", "F") or image.mode.startswith("I")


def pixels_of(image, wanted=AS_IT_IS):
    """uint8 (1, H, W) or (3, H, W) of an image of Pillow; UserError, ValueError where it is odd."""
    from PIL import Image

    gray = _is_gray(image)
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise ValueError(f"expected 8 or 16 bits a pixel, found 32 (mode {image.mode})")
    if image.mode.startswith("I"):  # 16 bits, which convert() would clip, not scale
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif gray:
        image = image.convert("L")
    elif image.mode in ("P", "PA"):  # by way of RGBA, or Pillow warns of a palette with alpha
        image = image.convert("RGBA").convert("RGB")
    else:
        image = image.convert("RGB")
    if wanted.colour is not None:
        image = image.convert({"gray": "L", "rgb": "RGB"}[wanted.colour])
    if wanted.size is not None and (image.height, image.width) != tuple(wanted.size):
        image = image.resize(wanted.size[::-1], Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def remade(pixels, wanted):
    """uint8 (1 or 3, H, W) of another size or colour."""
    from PIL import Image

    image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    return pixels_of(image, wanted)
