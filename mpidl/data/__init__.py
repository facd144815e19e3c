"""Sets of images and the queue of mini-batches."""

from mpidl.data.cache import NodeCache
from mpidl.data.datastore import ArrayDatastore, Datastore
from mpidl.data.digits import digits  # the function takes the module's name here
from mpidl.data.folder import ImageFolder
from mpidl.data.idx import idx_folder, read_idx
from mpidl.data.queue import MinibatchQueue
from mpidl.data.sources import open_data, open_test_data

__all__ = [
    "ArrayDatastore",
    "Datastore",
    "ImageFolder",
    "MinibatchQueue",
    "NodeCache",
    "digits",
    "idx_folder",
    "open_data",
    "open_test_data",
    "read_idx",
]
