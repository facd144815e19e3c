"""Options for training images: order, normalization, augmentation and reading.

This module does not import `annotations` from `__future__`, so that help() shows the types.
"""

from collections.abc import Sequence
from typing import Literal

from mpidl.data.transforms.normalize import NAMES, NUMBERS, NUMBERS_NAME, Name
from mpidl.options.declaration import (
    SIZE,
    Rule,
    Size,
    at_least,
    choice,
    option,
    options_class,
)


def _number_range(example: str, *, noun: str = "numbers", optional: bool = False) -> Rule:
    """Return the rule for a range, written as two numbers such as 0.9,1.1."""
    return Rule(
        str,
        f"a range of {noun} such as {example}",
        pattern=r"[0-9]{1,3}(\.[0-9]{1,6})?,[0-9]{1,3}(\.[0-9]{1,6})?",
        metavar="X,X",
        separator=",",
        optional=optional,
    )


NORMALIZATION = Rule(
    str,
    f"{', '.join(NAMES)} or {NUMBERS_NAME} such as 0.1307/0.3081",
    choices=NAMES,
    pattern=NUMBERS,
    metavar=NUMBERS_NAME,
)
PROBABILITY = Rule(float, "between 0 and 1", 0, 1)
AMOUNT = Rule(float, "between 0 and 10", 0, 10)
MIX = Rule(float, "0, or between 0.05 and 10", 0, 10)


@options_class
class ImageOptions:
    """The image options of `TrainingOptions`."""

    shuffle: Literal["never", "once", "every-epoch"] = choice(
        "When to shuffle the training set",
        default="once",
        resume="fixed",
        matlab="Shuffle",
    )
    sampling: Literal["global", "balanced", "partition"] = choice(
        "How ranks draw images: from the whole training set (global); from each class equally "
        "often, which repeats images of small classes (balanced); or each rank from its own "
        "partition, so that the weights depend on the number of ranks (partition)",
        default="global",
        resume="fixed",
        matlab="partition",
    )
    partial_minibatch: Literal["return", "discard"] = choice(
        "Use the last mini-batch of an epoch if it is smaller than the others, or discard it, so "
        "that an epoch has (number of training images) // (batch size) iterations",
        default="return",
        resume="fixed",
        matlab="PartialMiniBatch",
    )
    normalization: Name | str = option(
        NORMALIZATION,
        "Normalization of pixels: unchanged; divided by 255; scaled to [-1, 1]; with the mean and "
        "standard deviation of ImageNet's images; minus the mean of ImageNet's images; minus the "
        "mean of each channel; minus the mean image; minus the mean and divided by the standard "
        "deviation of each channel, over the training set; or with MEAN/STD of pixels from 0 to 1, "
        "such as 0.1307/0.3081. With --weights: the pixels that the weights expect",
        default="rescale-zero-one",
        resume="fixed",
        matlab="imageInputLayer(Normalization)",
    )
    flip: Literal["none", "x", "y", "xy"] = choice(
        "Mirror a random half of the training images: x left to right, y top to bottom, xy in "
        "both directions independently",
        default="none",
        resume="fixed",
        matlab="RandXReflection, RandYReflection",
    )
    flip_mode: Literal["random", "alternate"] = choice(
        "Mirror images at random in each epoch (random), or every image in every other epoch, "
        "with a random start (alternate)",
        default="random",
        resume="fixed",
    )
    translate: int = option(
        at_least(0),
        "Shift training images by up to this many pixels in each direction",
        default=0,
        resume="fixed",
        matlab="RandXTranslation, RandYTranslation",
    )
    rotation: float = option(
        Rule(float, "between 0 and 180", 0, 180),
        "Rotate training images by up to this many degrees in either direction",
        default=0.0,
        resume="fixed",
        matlab="RandRotation",
    )
    scale: str | Sequence[float] | None = option(
        _number_range("0.9,1.1", noun="factors", optional=True),
        "Scale training images by a random factor from this range",
        default=None,
        resume="fixed",
        matlab="RandScale",
    )
    shear: float = option(
        Rule(float, "at least 0 and below 45", 0, 45, exclude_high=True),
        "Shear training images by up to this many degrees, along x and along y",
        default=0.0,
        resume="fixed",
        matlab="RandXShear, RandYShear",
    )
    fill: int = option(
        Rule(int, "between 0 and 255", 0, 255),
        "Pixel value for areas outside the original image after augmentation",
        default=0,
        resume="fixed",
        matlab="FillValue",
    )
    random_crop: Size = option(
        SIZE,
        "Train on windows of this HEIGHTxWIDTH at random positions; validation, test and "
        "prediction use the central window",
        default=None,
        resume="fixed",
        matlab='OutputSizeMode="randcrop"',
    )
    resized_crop: Size = option(
        SIZE,
        "Train on windows of random area and aspect ratio, resized to this HEIGHTxWIDTH; "
        "validation, test and prediction use the central window of this size",
        default=None,
        resume="fixed",
        matlab="randomWindow2d, imresize",
    )
    crop_area: str | Sequence[float] = option(
        _number_range("0.08,1"),
        "Range of the window area for --resized-crop, as a fraction of the image area",
        default="0.08,1",
        resume="fixed",
    )
    crop_aspect: str | Sequence[float] = option(
        _number_range("0.75,1.333333"),
        "Range of the window's width divided by its height, for --resized-crop",
        default="0.75,1.333333",
        resume="fixed",
    )
    brightness: float = option(
        AMOUNT,
        "Multiply the pixels of training images by a random factor; a value x means a factor from "
        "max(0, 1 - x) to 1 + x",
        default=0.0,
        resume="fixed",
        matlab="jitterColorHSV(Brightness)",
    )
    contrast: float = option(
        AMOUNT,
        "Multiply the difference between each pixel and the image's mean gray value by a random "
        "factor, with the same range as for --brightness",
        default=0.0,
        resume="fixed",
        matlab="jitterColorHSV(Contrast)",
    )
    saturation: float = option(
        AMOUNT,
        "Multiply the difference between each colour and gray by a random factor, with the same "
        "range as for --brightness",
        default=0.0,
        resume="fixed",
        matlab="jitterColorHSV(Saturation)",
    )
    hue: float = option(
        Rule(float, "between 0 and 0.5", 0, 0.5),
        "Rotate the hues of training images by up to this fraction of the colour circle",
        default=0.0,
        resume="fixed",
        matlab="jitterColorHSV(Hue)",
    )
    erase: float = option(
        PROBABILITY,
        "Probability that a random rectangle of a training image is erased",
        default=0.0,
        resume="fixed",
    )
    erase_area: str | Sequence[float] = option(
        _number_range("0.02,0.4"),
        "Range of the area of the erased rectangle, as a fraction of the image area",
        default="0.02,0.4",
        resume="fixed",
    )
    erase_aspect: str | Sequence[float] = option(
        _number_range("0.3,3.333333"),
        "Range of the width of the erased rectangle divided by its height",
        default="0.3,3.333333",
        resume="fixed",
    )
    erase_value: str | int = option(
        Rule(
            str,
            "noise, or a number between 0 and 255",
            choices=("noise",),
            pattern=r"1?[0-9]{1,2}|2[0-4][0-9]|25[0-5]",
            metavar="V",
            separator=",",
        ),
        "Pixel value of the erased rectangle: uniform noise, or a number",
        default="noise",
        resume="fixed",
    )
    mixup: float = option(
        MIX,
        "Alpha of mixup: average each training image and its label with another image and its "
        "label, with a weight from the distribution Beta(alpha, alpha); 0 disables mixup",
        default=0.0,
        resume="fixed",
    )
    cutmix: float = option(
        MIX,
        "Alpha of CutMix: replace a random rectangle of each training image by the same rectangle "
        "of another image, and mix the labels by area; 0 disables CutMix. With --mixup, one of "
        "the two methods is drawn at random for each image",
        default=0.0,
        resume="fixed",
    )
    mix_probability: float = option(
        Rule(float, "above 0 and at most 1", 0, 1, exclude_low=True),
        "Probability that --mixup or --cutmix combines an image with another image",
        default=1.0,
        resume="fixed",
    )
    test_flips: Literal["none", "x", "y", "xy"] = choice(
        "Average the scores of the final test over each image and its mirror images: x left to "
        "right, y top to bottom, xy in both directions",
        default="none",
    )
    on_bad_image: Literal["stop", "skip"] = choice(
        "If an image cannot be read: stop, or skip the image, count it and list it in "
        "bad-images.csv",
        default="stop",
    )
    workers: int = option(
        at_least(1),
        "Threads per rank that read, decode and augment images ahead of training; affects speed "
        "only",
        default=1,
        matlab="DispatchInBackground, PreprocessingEnvironment",
    )
    prefetch: int = option(
        at_least(0),
        "Mini-batches to prepare in advance; 0 prepares each mini-batch when it is needed",
        default=2,
        matlab="DispatchInBackground",
    )
    cache_mb: int = option(
        at_least(0),
        "Memory per host for data in MB (10**6 bytes), in addition to the current mini-batch. "
        "Memory for prefetched mini-batches is reserved first. The rest caches decoded images for "
        "all ranks of the host; images that do not fit are read again in each epoch",
        default=1024,
    )
