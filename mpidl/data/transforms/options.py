"""Options of training that select the transforms of images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from mpidl.options.declaration import (
    SIZE,
    Rule,
    Size,
    at_least,
    choice,
    declared,
    factor,
    one_of,
    option,
    options_class,
)

if TYPE_CHECKING:
    from mpidl.data.transforms.augment import Augmenter

# The last three names need statistics of a training set; "rescale-symmetric" does for floats.
NormalizationName: TypeAlias = Literal[
    "none",
    "rescale-zero-one",
    "rescale-symmetric",
    "imagenet",
    "caffe",
    "zerocenter",
    "zerocenter-element",
    "zscore",
]
NORMALIZATIONS = get_args(NormalizationName)
_NUMBER = r"([0-9]{1,3}(\.[0-9]{1,9})?|\.[0-9]{1,9})"
_ROW = rf"{_NUMBER}(,{_NUMBER})*"
NUMBERS = rf"{_ROW}/{_ROW}"  # pattern of means and deviations of pixels from 0 to 1
NUMBERS_NAME = "MEAN/STD"


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
    f"{', '.join(NORMALIZATIONS)} or {NUMBERS_NAME} such as 0.1307/0.3081",
    choices=NORMALIZATIONS,
    pattern=NUMBERS,
    metavar=NUMBERS_NAME,
)
PROBABILITY = Rule(float, "between 0 and 1", 0, 1)
AMOUNT = Rule(float, "between 0 and 10", 0, 10)
MIX = Rule(float, "0, or between 0.05 and 10", 0.05, 10, or_zero=True)
MIX_PROBABILITY = factor()


@options_class(group="Images")
class PreprocessOptions:
    """The options of the commands for preprocessing, in the order of the operations."""

    colour: str | None = option(
        one_of("gray", "rgb", optional=True), "Convert images to gray or to RGB", default=None
    )
    resize: Size = option(SIZE, "Resize images to this size, bilinearly", default=None)
    cover: Size = option(
        SIZE,
        "Resize images, keeping their proportions, to the smallest size that covers this size",
        default=None,
    )
    centre_crop: Size = option(SIZE, "Crop images to this size around the centre", default=None)


@options_class(group="Images", resume="fixed")
class NormalizationOptions:
    """The option of `TrainingOptions` for normalization."""

    normalization: NormalizationName | str = option(
        NORMALIZATION,
        "Normalization of pixels: unchanged; divided by 255; scaled to [-1, 1]; with the mean and "
        "standard deviation of ImageNet's images; minus the mean of ImageNet's images; minus the "
        "mean of each channel; minus the mean image; minus the mean and divided by the standard "
        "deviation of each channel, over the training set; or with MEAN/STD of pixels from 0 to 1, "
        "such as 0.1307/0.3081. With --weights: the pixels that the weights expect",
        default="rescale-zero-one",
        matlab="imageInputLayer(Normalization)",
    )


@options_class(group="Augmentation", resume="fixed")
class AugmentationOptions:
    """The options of `TrainingOptions` for augmentation."""

    flip: Literal["none", "x", "y", "xy"] = choice(
        "Mirror a random half of the training images: x left to right, y top to bottom, xy in "
        "both directions independently",
        default="none",
        matlab="RandXReflection, RandYReflection",
    )
    flip_mode: Literal["random", "alternate"] = choice(
        "Mirror images at random in each epoch (random), or every image in every other epoch, "
        "with a random start (alternate)",
        default="random",
    )
    translate: int = option(
        at_least(0),
        "Shift training images by up to this many pixels in each direction",
        default=0,
        matlab="RandXTranslation, RandYTranslation",
    )
    rotation: float = option(
        Rule(float, "between 0 and 180", 0, 180),
        "Rotate training images by up to this many degrees in either direction",
        default=0.0,
        matlab="RandRotation",
    )
    scale: str | Sequence[float] | None = option(
        _number_range("0.9,1.1", noun="factors", optional=True),
        "Scale training images by a random factor from this range",
        default=None,
        matlab="RandScale",
    )
    shear: float = option(
        Rule(float, "at least 0 and below 45", 0, 45, exclude_high=True),
        "Shear training images by up to this many degrees, along x and along y",
        default=0.0,
        matlab="RandXShear, RandYShear",
    )
    fill: int = option(
        Rule(int, "between 0 and 255", 0, 255),
        "Pixel value for areas outside the original image after augmentation",
        default=0,
        matlab="FillValue",
    )
    random_crop: Size = option(
        SIZE,
        "Train on windows of this HEIGHTxWIDTH at random positions; validation, test and "
        "prediction use the central window",
        default=None,
        matlab='OutputSizeMode="randcrop"',
    )
    resized_crop: Size = option(
        SIZE,
        "Train on windows of random area and aspect ratio, resized to this HEIGHTxWIDTH; "
        "validation, test and prediction use the central window of this size",
        default=None,
        matlab="randomWindow2d, imresize",
    )
    crop_area: str | Sequence[float] = option(
        _number_range("0.08,1"),
        "Range of the window area for --resized-crop, as a fraction of the image area",
        default="0.08,1",
    )
    crop_aspect: str | Sequence[float] = option(
        _number_range("0.75,1.333333"),
        "Range of the window's width divided by its height, for --resized-crop",
        default="0.75,1.333333",
    )
    brightness: float = option(
        AMOUNT,
        "Multiply the pixels of training images by a random factor; a value x means a factor from "
        "max(0, 1 - x) to 1 + x",
        default=0.0,
        matlab="jitterColorHSV(Brightness)",
    )
    contrast: float = option(
        AMOUNT,
        "Multiply the difference between each pixel and the image's mean gray value by a random "
        "factor, with the same range as for --brightness",
        default=0.0,
        matlab="jitterColorHSV(Contrast)",
    )
    saturation: float = option(
        AMOUNT,
        "Multiply the difference between each colour and gray by a random factor, with the same "
        "range as for --brightness",
        default=0.0,
        matlab="jitterColorHSV(Saturation)",
    )
    hue: float = option(
        Rule(float, "between 0 and 0.5", 0, 0.5),
        "Rotate the hues of training images by up to this fraction of the colour circle",
        default=0.0,
        matlab="jitterColorHSV(Hue)",
    )
    posterize: float = option(
        PROBABILITY,
        "Probability that the colours of a training image are reduced to --posterize-bits",
        default=0.0,
    )
    posterize_bits: int = option(
        Rule(int, "between 1 and 8", 1, 8),
        "Highest bits of each 8-bit channel that --posterize keeps; the other bits become 0",
        default=4,
    )
    erase: float = option(
        PROBABILITY,
        "Probability that a random rectangle of a training image is erased",
        default=0.0,
    )
    erase_area: str | Sequence[float] = option(
        _number_range("0.02,0.4"),
        "Range of the area of the erased rectangle, as a fraction of the image area",
        default="0.02,0.4",
    )
    erase_aspect: str | Sequence[float] = option(
        _number_range("0.3,3.333333"),
        "Range of the width of the erased rectangle divided by its height",
        default="0.3,3.333333",
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
    )
    augmenter: "Augmenter | None" = None  # in Python only, instead of the options above


def changed_augmentation(options: AugmentationOptions) -> list[str]:
    """Return the names of the options of augmentation that differ from their defaults."""
    declarations = declared(AugmentationOptions).items()
    return [name for name, rule in declarations if getattr(options, name) != rule.default]


@options_class(group="Augmentation", resume="fixed")
class MixingOptions:
    """The options of `TrainingOptions` for mixup and CutMix."""

    mixup: float = option(
        MIX,
        "Alpha of mixup: average each training image and its label with another image and its "
        "label, with a weight from the distribution Beta(alpha, alpha); 0 disables mixup",
        default=0.0,
    )
    cutmix: float = option(
        MIX,
        "Alpha of CutMix: replace a random rectangle of each training image by the same rectangle "
        "of another image, and mix the labels by area; 0 disables CutMix. With --mixup, one of "
        "the two methods is drawn at random for each image",
        default=0.0,
    )
    mix_probability: float = option(
        MIX_PROBABILITY,
        "Probability that --mixup or --cutmix combines an image with another image",
        default=1.0,
    )
