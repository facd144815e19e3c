"""A folder of images, one sub-folder a class."""

import copy
import os
import re

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.data.datastore import Datastore, counted
from mpidl.data.formats.format import OpenOptions, World, format_of_parts
from mpidl.data.formats.image_files import KINDS, SUFFIXES, decode
from mpidl.data.transforms.preprocess import AS_IT_IS, Preprocessed
from mpidl.errors import UserError
from mpidl.files import Stamp, changed, digest, on_rank_0, stamp
from mpidl.text import did_you_mean, printable

TEST_FOLDERS = ("test", "val", "valid", "validation")


class ImageFolder(Datastore):
    """Image files; an image's label is the sub-folder of `folder` that it lies in.

    PNG, JPEG, BMP and TIFF (of several pages the first), by their names (.png, .jpg, .jpeg, .bmp,
    .tif, .tiff) and their content.

    The sub-folders may have sub-folders. Files are sorted by the bytes of their relative paths,
    classes by the bytes of their names. Hidden files and files of other kinds are passed over.
    With a world it is collective: rank 0 lists and looks at the first image, the others are told.

    classes: the names that labels count by, where another set (the one trained on) has fixed them.
    labelled=False accepts images outside of class sub-folders, and other sub-folders than the
    classes; the labels are then not known (None), and `unlabelled` says why, None where there are
    no sub-folders or the labels are known.

    Images are gray (C = 1; from gray, gray with alpha, black and white; of 16 bits the high 8) or
    RGB (C = 3; from RGB, RGB with alpha, palette, CMYK, YCbCr). Alpha is dropped and the
    orientation a camera noted is not applied. All images are of the first one's size and kind,
    unless preprocess, a `Preprocess`, resizes and converts them (None: as they are; of a trained
    network, net.preprocess).

    A file that is removed or changed after it was listed is a UserError when it is read.
    """

    def __init__(
        self,
        folder,
        world=None,
        *,
        classes=None,
        labelled=True,
        preprocess=AS_IT_IS,
    ):
        self.folder = os.fspath(folder)
        self.wanted = preprocess or AS_IT_IS
        self.preprocess = self.wanted or None
        found = on_rank_0(world, lambda: listing(self.folder, classes, labelled, self.wanted))
        self.files, self.sizes, self.written, *found = found
        self.labels, self.classes, self.image_shape, self.unlabelled = found

    def __len__(self):
        return len(self.files)

    def read(self, indices):
        # in the arena: of new memory, clearing the pages would cost a fifth of decoding
        images = arenas.to_read((len(indices), *self.image_shape), np.uint8)
        for image, i in zip(images, indices, strict=True):
            path = os.path.join(self.folder, self.files[i])
            pixels, now = decode(path, self.wanted, self.image_shape, image)
            if now != (self.sizes[i], self.written[i]):
                before = Stamp(int(self.sizes[i]), int(self.written[i]))
                raise changed(path, before, now)
            if isinstance(pixels, tuple):
                raise UserError(self._other_shape(path, pixels))
        return images

    def name(self, i):
        return printable(os.path.join(self.folder, self.files[i]))

    def describe(self):
        return f"{printable(self.folder)}: {counted(self)}"

    def fingerprint(self):
        # Relative paths: the same files in another place are the same set.
        found = digest(super().fingerprint(), *self.files, self.sizes)
        return found if self.wanted == AS_IT_IS else digest(found, self.wanted)

    def preprocessed(self, preprocess):
        """These files after a `Preprocess`, of whatever sizes they are: see `data.preprocessed`."""
        if self.preprocess is not None:
            return Preprocessed(self, preprocess)
        found = copy.copy(self)
        found.wanted = found.preprocess = preprocess
        found.image_shape = preprocess.image_shape(self.image_shape)
        return found

    def _other_shape(self, path, found):
        expected, found = (
            f"{shape[2]}x{shape[1]} {KINDS[shape[0]]}" for shape in (self.image_shape, found)
        )
        return (
            f"{printable(path)}: expected a {expected} image like the first one "
            f"({printable(self.files[0])}), found {found}; all images must have one size and be "
            "all gray or all RGB: --resize HxW and --colour rgb make them so (in Python preprocess="
            "dl.Preprocess(...), for a trained network preprocess=net.preprocess)"
        )


def listing(folder, classes=None, labelled=True, wanted=AS_IT_IS):
    """(files, sizes in bytes, when written, labels or None, classes, image_shape, why there are no
    labels or None) of a folder."""
    needs = f"expected sub-folders named by class, with {', '.join(SUFFIXES)} files in them"
    check_folder(folder)
    found = sorted(images_below(folder), key=lambda item: os.fsencode(item[0]))
    folders = sub_folders(folder)
    if not found:
        empty = "an empty folder" if not visible(folder) else "no such file"
        raise UserError(f"{printable(folder)}: {needs}; found {empty}")
    files = [file for file, _ in found]
    sizes, written = np.array([when for _, when in found], np.int64).T
    stray = [file for file in files if os.sep not in file]
    names = [file.split(os.sep)[0] for file in files if os.sep in file]
    problem = None
    if not names:
        problem = f"{needs}; found images ({printable(stray[0])}) and no class sub-folders"
    elif stray:
        problem = f"{printable(stray[0])} lies outside of the class sub-folders: move it into one"
    elif classes is None and set(folders) - set(names):
        bare = [name for name in folders if name not in names]
        problem = f"sub-folder {printable(bare[0])} has no images: fill it, or remove it"
    elif classes is not None and (other := sorted(set(names) - set(classes), key=os.fsencode)):
        problem = (
            f"sub-folder {printable(other[0])} is none of the classes "
            f"({', '.join(printable(name) for name in classes)}){did_you_mean(other[0], classes)}"
        )
    if problem and labelled:
        raise UserError(f"{printable(folder)}: {problem}")
    labels = None
    if classes is None:
        classes = [] if problem else folders
    if not problem:
        label = {name: i for i, name in enumerate(classes)}
        labels = np.array([label[name] for name in names], np.int64)
    pixels, _ = decode(os.path.join(folder, files[0]), wanted)
    why = problem if names else None
    return files, sizes, written, labels, list(classes), pixels.shape, why


def images_below(folder, inside="", ancestors=()):
    """Yield (path relative to the first `folder`, Stamp) of each image file, unsorted."""
    try:
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in ancestors:  # a link back up
            return
        ancestors = (*ancestors, (here.st_dev, here.st_ino))
        for entry in visible(folder):
            relative = os.path.join(inside, entry.name)
            if entry.is_dir():
                yield from images_below(entry.path, relative, ancestors)
            elif entry.name.lower().endswith(SUFFIXES):
                try:
                    yield relative, stamp(entry.stat())
                except FileNotFoundError:
                    raise UserError(f"{printable(entry.path)}: a link to a missing file") from None
    except OSError as e:
        raise UserError(f"{printable(folder)}: the folder cannot be read: {reason(e)}") from None


def visible(folder):
    """The entries of a folder but for hidden ones (.DS_Store, ._x, ...)."""
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def sub_folders(folder):
    """The names of a folder's sub-folders, sorted by bytes."""
    return sorted((e.name for e in visible(folder) if e.is_dir()), key=os.fsencode)


def check_folder(folder, option=None):
    """A UserError where `folder` is none that can be listed, with the nearest name there is."""
    prefix = f"{option} {printable(folder)}" if option else printable(folder)
    if not os.path.exists(folder):
        if re.match(r"\w+://", str(folder)):
            what = "S3 is" if str(folder).startswith("s3:") else "URLs are"
            raise UserError(f"{prefix}: {what} not supported yet: expected files of this machine")
        parent, name = os.path.split(os.path.abspath(folder))
        try:
            others = [entry.name for entry in visible(parent) if entry.is_dir()]
        except OSError:
            others = []
        others += ["digits"] if option else []
        raise UserError(f"{prefix}: no such folder{did_you_mean(name, others)}")
    if not os.path.isdir(folder):
        raise UserError(f"{prefix}: expected a folder, found a file")
    try:
        visible(folder)
    except OSError as e:
        raise UserError(f"{prefix}: the folder cannot be read: {reason(e)}") from None


def reason(error):
    """What went wrong, without the path and the number that an OSError's text has."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def is_image_file(entry):
    """Whether a folder's entry is an image file, by its name."""
    return entry.name.lower().endswith(SUFFIXES) and not entry.is_dir()


def _is_split(path: str, head: bytes, option: str) -> bool:
    """Tell whether a folder has train/ and test/; UserError if it has the first without the second.

    A class may be called "train", so nothing but such names may be in the folder.
    """
    names = sub_folders(path)
    if "train" not in names or not set(names) <= {"train", *TEST_FOLDERS}:
        return False
    train = os.path.join(path, "train")
    if not sub_folders(train) or any(is_image_file(entry) for entry in visible(train)):
        return False
    if "test" not in names:
        hint = f" and --test-data {printable(path)}/{names[-1]}" if len(names) > 1 else ""
        raise UserError(
            f"{option} {printable(path)}: found train/ but no test/ beside it; name the "
            f"folders themselves: --data {printable(train)}{hint}"
        )
    return True


def _open_folder(folder: str, world: World, options: OpenOptions) -> ImageFolder:
    return ImageFolder(
        folder,
        world,
        classes=options.classes,
        labelled=options.labelled,
        preprocess=options.preprocess,
    )


TRAIN_AND_TEST = format_of_parts(
    "train and test folders",
    recognizes=_is_split,
    open_part=lambda path, part, world, options: _open_folder(
        os.path.join(path, part), world, options
    ),
    parts=lambda path: ["train", "test"],
)
CLASS_FOLDERS = format_of_parts(
    "class folders",
    recognizes=lambda path, head, option: True,
    open_part=lambda path, part, world, options: _open_folder(path, world, options),
)
