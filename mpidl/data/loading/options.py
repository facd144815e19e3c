"""Options of training for the order in which images are used, and for reading them."""

from typing import Literal

from mpidl.options.declaration import at_least, choice, option, options_class


@options_class(group="Images", resume="fixed")
class OrderOptions:
    """The options of `TrainingOptions` for the order in which images are used."""

    shuffle: Literal["never", "once", "every-epoch"] = choice(
        "When to shuffle the training set",
        default="once",
        matlab="Shuffle",
    )
    sampling: Literal["global", "balanced", "partition"] = choice(
        "How ranks draw images: from the whole training set (global); from each class equally "
        "often, which repeats images of small classes (balanced); or each rank from its own "
        "partition, so that the weights depend on the number of ranks (partition)",
        default="global",
        matlab="partition",
    )
    partial_minibatch: Literal["return", "discard"] = choice(
        "Use the last mini-batch of an epoch if it is smaller than the others, or discard it, so "
        "that an epoch has (number of training images) // (batch size) iterations",
        default="return",
        matlab="PartialMiniBatch",
    )


@options_class(group="Hardware and speed")
class ReadingOptions:
    """The options of `TrainingOptions` for reading images."""

    test_flips: Literal["none", "x", "y", "xy"] = choice(
        "Average the scores of the final test over each image and its mirror images: x left to "
        "right, y top to bottom, xy in both directions",
        default="none",
        group="Augmentation",
    )
    on_bad_image: Literal["stop", "skip"] = choice(
        "If an image cannot be read: stop, or skip the image, count it and list it in "
        "bad-images.csv",
        default="stop",
        group="Images",
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
