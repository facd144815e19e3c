"""Data formats that `--data` accepts: one module per format, and the tables of all formats.

To add a format, write a module that defines `FORMAT`, and append `FORMAT` to FILES or FOLDERS.
"""

from mpidl.data.formats import cells, cifar, digits, folder, hdf5, idx, mat, npz, packed, table
from mpidl.data.formats.cells import Cells
from mpidl.data.formats.cifar import cifar_folder
from mpidl.data.formats.folder import ImageFolder
from mpidl.data.formats.hdf5 import HDF5Datastore
from mpidl.data.formats.idx import idx_folder, read_idx
from mpidl.data.formats.mat import mat_file
from mpidl.data.formats.npz import npz_file
from mpidl.data.formats.packed import PackedDatastore
from mpidl.data.formats.packing import pack
from mpidl.data.formats.split_files import split_files
from mpidl.data.formats.table import ImageTable

# The first format that recognizes a path opens it, so the order matters.
FILES = (packed.FORMAT, hdf5.FORMAT, mat.FORMAT, npz.FORMAT, table.FORMAT)
FOLDERS = (
    idx.FORMAT,
    cifar.FORMAT,
    split_files(FILES),
    folder.TRAIN_AND_TEST,
    folder.CLASS_FOLDERS,
)
KEYWORDS = (digits.FORMAT, cells.FORMAT)  # formats that `--data` selects by name, not by path
FORMATS = (*KEYWORDS, *FILES, *FOLDERS)

__all__ = [
    "Cells",
    "HDF5Datastore",
    "ImageFolder",
    "ImageTable",
    "PackedDatastore",
    "cifar_folder",
    "idx_folder",
    "mat_file",
    "npz_file",
    "pack",
    "read_idx",
]
