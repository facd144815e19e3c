"""Open image sets, transform their images and deliver them in mini-batches."""

from mpidl.data.array_datastore import ArrayDatastore
from mpidl.data.combined import combined
from mpidl.data.datastore import Datastore
from mpidl.data.formats import *
from mpidl.data.formats import __all__ as _formats
from mpidl.data.formats.cells import cells  # `data.cells` is this function, not the module
from mpidl.data.formats.digits import (  # `data.digits` is this function, not the module
    digit_angles,
    digits,
)
from mpidl.data.loading.bad_images import BadImages
from mpidl.data.loading.cache import NodeCache
from mpidl.data.queue import MinibatchQueue
from mpidl.data.registry import open_data, open_test_data, open_validation_data
from mpidl.data.storage.settings import configure as configure_storage
from mpidl.data.transforms.augment import Augmenter
from mpidl.data.transforms.mixing import Mixing
from mpidl.data.transforms.normalize import Normalization, normalization, statistics
from mpidl.data.transforms.preprocess import Preprocess, preprocessed

__all__ = [
    "ArrayDatastore",
    "Augmenter",
    "BadImages",
    "Datastore",
    "MinibatchQueue",
    "Mixing",
    "NodeCache",
    "Normalization",
    "Preprocess",
    "cells",
    "combined",
    "configure_storage",
    "digit_angles",
    "digits",
    "normalization",
    "open_data",
    "open_test_data",
    "open_validation_data",
    "preprocessed",
    "statistics",
    *_formats,
]
