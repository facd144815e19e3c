"""Sets of images and the queue of mini-batches."""

from mpidl.data.augment import Augmenter
from mpidl.data.cache import NodeCache
from mpidl.data.cifar import cifar_folder
from mpidl.data.combined import combined
from mpidl.data.datastore import ArrayDatastore, Datastore
from mpidl.data.digits import digits  # the function takes the module's name here
from mpidl.data.folder import ImageFolder
from mpidl.data.hdf5 import HDF5Datastore
from mpidl.data.idx import idx_folder, read_idx
from mpidl.data.mat import mat_file
from mpidl.data.normalize import Normalization, normalization, statistics
from mpidl.data.packed import PackedDatastore
from mpidl.data.packing import pack
from mpidl.data.preprocess import Preprocess, preprocessed
from mpidl.data.queue import MinibatchQueue
from mpidl.data.sources import open_data, open_test_data

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
