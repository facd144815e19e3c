"""The formats of the files and folders that `--data` accepts, in the order of recognition.

To add a format, write a module that defines `FORMAT`, and append `FORMAT` to FILES or FOLDERS.
"""

from mpidl.data.formats import cifar, folder, hdf5, idx, mat, npz, packed, table
from mpidl.data.formats.split_files import split_files

# The first format that recognizes a path opens it, so the order matters.
FILES = (packed.FORMAT, hdf5.FORMAT, mat.FORMAT, npz.FORMAT, table.FORMAT)
FOLDERS = (
    idx.FORMAT,
    cifar.FORMAT,
    split_files(FILES),
    folder.TRAIN_AND_TEST,
    folder.CLASS_FOLDERS,
)
FORMATS = (*FILES, *FOLDERS)
