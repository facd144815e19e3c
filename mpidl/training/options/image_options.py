"""The options of what a network is shown: order, normalization, augmentation, reading ahead."""

from dataclasses import dataclass

from mpidl.data.transforms.normalize import NAMES as NORMALIZATIONS
from mpidl.training.options.option_types import SIZE, Rule, at_least, one_of, option


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Part of `options.TrainingOptions`."""

    shuffle: str = option(
        "once",
        one_of("never", "once", "every-epoch"),
        "order of the training set",
        resume="fixed",
        matlab="Shuffle",
    )
    sampling: str = option(
        "global",
        one_of("global", "partition"),
        "partition: each rank has a part of the training set to itself and orders that, so that "
        "the weights depend on the number of ranks",
        resume="fixed",
        matlab="partition",
    )
    normalization: str = option(
        "rescale-zero-one",
        one_of(*NORMALIZATIONS),
        "what pixels become: as they are, divided by 255, from -1 to 1, less the mean of each "
        "channel, less the mean image, or less the mean and divided by the standard deviation of "
        "each channel, over the training set",
        resume="fixed",
        matlab="imageInputLayer(Normalization)",
    )
    flip: str = option(
        "none",
        one_of("none", "x", "y", "xy"),
        "mirror half of the training images left to right, top to bottom, or each for half of them",
        resume="fixed",
        matlab="RandXReflection, RandYReflection",
    )
    translate: int = option(
        0,
        at_least(0),
        "move training images by up to so many pixels each way",
        resume="fixed",
        matlab="RandXTranslation, RandYTranslation",
    )
    rotation: float = option(
        0.0,
        Rule(float, "between 0 and 180", 0, 180),
        "turn training images by up to so many degrees each way",
        resume="fixed",
        matlab="RandRotation",
    )
    scale: str | None = option(
        None,
        Rule(
            str,
            "a range of factors such as 0.9,1.1",
            pattern=r"[0-9]{1,3}(\.[0-9]{1,6})?,[0-9]{1,3}(\.[0-9]{1,6})?",
            shape="X,X",
            joint=",",
            optional=True,
        ),
        "scale training images by a factor of this range",
        resume="fixed",
        matlab="RandScale",
    )
    shear: float = option(
        0.0,
        Rule(float, "at least 0 and below 45", 0, 45, below=True),
        "shear training images by up to so many degrees, along x and along y",
        resume="fixed",
        matlab="RandXShear, RandYShear",
    )
    fill: int = option(
        0,
        Rule(int, "between 0 and 255", 0, 255),
        "the pixels beyond the edges of an image that was moved",
        resume="fixed",
        matlab="FillValue",
    )
    random_crop: str | None = option(
        None,
        SIZE,
        "train on windows of this HEIGHTxWIDTH at random places; others are cut in the centre",
        resume="fixed",
        matlab='OutputSizeMode="randcrop"',
    )
    workers: int = option(
        1,
        at_least(1),
        "threads of a rank that read, decode and augment images ahead, on which nothing depends "
        "but time",
        matlab="DispatchInBackground, PreprocessingEnvironment",
    )
    prefetch: int = option(
        2,
        at_least(0),
        "mini-batches that they make ahead of their use; 0: made when they are needed",
        matlab="DispatchInBackground",
    )
    cache_mb: int = option(
        1024,
        at_least(0),
        "MB (10**6 bytes) of memory a host for data, beyond the mini-batch in use: mini-batches "
        "made ahead come first; in what they leave decoded images are kept for all of its ranks, "
        "and those that do not fit are read anew in each epoch",
    )
