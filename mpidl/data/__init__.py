"""Image sets and the queue of mini-batches."""

from mpidl.data.combined import combined
from mpidl.data.datastore import ArrayDatastore, Datastore
from mpidl.data.formats.cifar import cifar_folder
from mpidl.data.formats.digits import digits  # the function, not the module
from mpidl.data.formats.folder import ImageFolder
from mpidl.data.formats.hdf5 import HDF5Datastore
from mpidl.data.formats.idx import idx_folder, read_idx
from mpidl.data.formats.mat import mat_file
from mpidl.data.formats.packed import PackedDatastore
from mpidl.data.formats.packing import pack
from mpidl.data.loading.cache import NodeCache
from mpidl.data.queue import MinibatchQueue
from mpidl.data.registry import open_data, open_test_data
from mpidl.data.transforms.augment import Augmenter
from mpidl.data.transforms.normalize import Normalization, normalization, statistics
from mpidl.data.transforms.preprocess import Preprocess, preprocessed

__all__ = [
    "ArrayDatastore",
    "Augmenter",
    "Datastore",
    "HDF5Datastore",
    "ImageFolder",
    "MinibatchQueue",
    "NodeCache",
    "Normalization",
    "PackedDatastore",
    "Preprocess",
    "cifar_folder",
    "combined",
    "digits",
    "idx_folder",
    "mat_file",
    "normalization",
    "open_data",
    "open_test_data",
    "pack",
    "preprocessed",
    "read_idx",
    "statistics",
]
