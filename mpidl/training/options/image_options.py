"""The options of the images that a network trains on: order, normalization, augmentation, reading.

Annotations stay real types, not strings, so that help() prints them as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpidl.data.transforms.normalize import Name
from mpidl.training.options.option_types import SIZE, Rule, Size, at_least, choice, option


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The part of `TrainingOptions` about images."""

    shuffle: Literal["never", "once", "every-epoch"] = choice(
        "once",
        "When to shuffle the training set",
        resume="fixed",
        matlab="Shuffle",
    )
    sampling: Literal["global", "partition"] = choice(
        "global",
        "How ranks draw images: from the whole training set, or each rank from its own partition "
        "(the weights then depend on the number of ranks)",
        resume="fixed",
        matlab="partition",
    )
    normalization: Name = choice(
        "rescale-zero-one",
        "Normalization of pixels: unchanged; divided by 255; scaled to [-1, 1]; minus the mean of "
        "each channel; minus the mean image; or minus the mean and divided by the standard "
        "deviation of each channel. Statistics are those of the training set",
        resume="fixed",
        matlab="imageInputLayer(Normalization)",
    )
    flip: Literal["none", "x", "y", "xy"] = choice(
        "none",
        "Mirror a random half of the training images: x left to right, y top to bottom, xy both "
        "independently",
        resume="fixed",
        matlab="RandXReflection, RandYReflection",
    )
    translate: int = option(
        0,
        at_least(0),
        "Shift training images by up to this many pixels in each direction",
        resume="fixed",
        matlab="RandXTranslation, RandYTranslation",
    )
    rotation: float = option(
        0.0,
        Rule(float, "between 0 and 180", 0, 180),
        "Rotate training images by up to this many degrees either way",
        resume="fixed",
        matlab="RandRotation",
    )
    scale: str | Sequence[float] | None = option(
        None,
        Rule(
            str,
            "a range of factors such as 0.9,1.1",
            pattern=r"[0-9]{1,3}(\.[0-9]{1,6})?,[0-9]{1,3}(\.[0-9]{1,6})?",
            metavar="X,X",
            separator=",",
            optional=True,
        ),
        "Scale training images by a random factor from this range",
        resume="fixed",
        matlab="RandScale",
    )
    shear: float = option(
        0.0,
        Rule(float, "at least 0 and below 45", 0, 45, exclude_high=True),
        "Shear training images by up to this many degrees, along x and along y",
        resume="fixed",
        matlab="RandXShear, RandYShear",
    )
    fill: int = option(
        0,
        Rule(int, "between 0 and 255", 0, 255),
        "Pixel value for areas outside the original image after augmentation",
        resume="fixed",
        matlab="FillValue",
    )
    random_crop: Size = option(
        None,
        SIZE,
        "Train on windows of this HEIGHTxWIDTH at random positions; validation, test and "
        "prediction use the central window",
        resume="fixed",
        matlab='OutputSizeMode="randcrop"',
    )
    workers: int = option(
        1,
        at_least(1),
        "Threads per rank that read, decode and augment images ahead of training; affects speed "
        "only",
        matlab="DispatchInBackground, PreprocessingEnvironment",
    )
    prefetch: int = option(
        2,
        at_least(0),
        "Mini-batches to prepare ahead of their use; 0 prepares each when it is needed",
        matlab="DispatchInBackground",
    )
    cache_mb: int = option(
        1024,
        at_least(0),
        "Memory per host for data in MB (10**6 bytes), beyond the mini-batch in use. Prefetched "
        "mini-batches take their share first; the rest caches decoded images for all ranks of the "
        "host, and images that do not fit are read again in each epoch",
    )
