"""Read folders of image files that have one sub-folder per class, or one per part of the set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mpidl.data.datastore import counted
from mpidl.data.formats.format import PART_NAMES, PARTS, OpenOptions, World, format_of_parts
from mpidl.data.formats.image_files import SUFFIXES
from mpidl.data.formats.image_list import ImageList, Listing
from mpidl.data.paths import Entry, check_remote, exists, is_folder, listed, scan
from mpidl.data.transforms.preprocess import AS_IT_IS, Preprocess
from mpidl.data.urls import is_remote
from mpidl.errors import UserError
from mpidl.files import Stamp, on_rank_0, reason, stamp
from mpidl.matlab_names import explain_arguments
from mpidl.text import did_you_mean, name_list, printable


class ImageFolder(ImageList):
    """A datastore of image files. The sub-folder that contains a file determines its label.

    With a world, construction is collective: rank 0 lists the files, decodes the first image and
    broadcasts the results.

    Parameters
    ----------
    folder : path-like
        The folder. Sub-folders may be nested, and the first level determines the label.
    world : World, optional
        The ranks that open the folder together.
    classes : sequence of str, optional
        Class names in the order of the labels, usually from the training set. The default is the
        sorted names of the sub-folders.
    labelled : bool
        Whether labels are required. If False, images may lie outside the class sub-folders, and
        sub-folders need not be classes. In these cases, the labels are None.
    preprocess : Preprocess or None
        Conversion to apply to the images. For a trained network, pass ``net.preprocess``. With
        None, images are not converted, and all images must have the size and colour of the first
        image.

    Attributes
    ----------
    files : list of str
        Paths of the images relative to `folder`.
    sizes, written : ndarray
        Size of each file in bytes, and time of each file's last change in nanoseconds.
    unlabelled : str or None
        Reason why there are no labels. None if there are labels, or if no image is in a sub-folder.

    Raises
    ------
    UserError
        If there are no images, or if the labels cannot be determined. `read` raises UserError if a
        file was removed or changed after the folder was listed.

    Notes
    -----
    PNG, JPEG, BMP and TIFF files are recognized by their names (.png, .jpg, .jpeg, .bmp, .tif,
    .tiff) and decoded according to their content. Only the first page of a TIFF file is read.
    Hidden files and all other files are ignored. Files are sorted by the bytes of their relative
    paths, and classes by the bytes of their names.

    Gray images, gray images with alpha, and black-and-white images become gray (C = 1). Only the
    high 8 bits of 16-bit pixels are kept. RGB (with or without alpha), palette, CMYK and YCbCr
    images become RGB (C = 3). Alpha is dropped. The orientation that a camera stores is not
    applied.
    """

    @explain_arguments
    def __init__(
        self,
        folder: str | os.PathLike[str],
        world: World = None,
        *,
        classes: Sequence[str] | None = None,
        labelled: bool = True,
        preprocess: Preprocess | None = AS_IT_IS,
    ):
        folder = os.fspath(folder)
        with listed(folder):
            super().__init__(
                folder, world, lambda: list_images(folder, classes, labelled), preprocess
            )

    def describe(self) -> str:
        return f"{printable(self.folder)}: {counted(self)}"


def list_images(
    folder: str, classes: Sequence[str] | None = None, labelled: bool = True
) -> Listing:
    """List the images of a folder and derive their labels.

    Raises UserError if there are no images, or if `labelled` is True and the labels cannot be
    determined.
    """
    needs = f"expected sub-folders named by class, with {', '.join(SUFFIXES)} files in them"
    check_folder(folder)
    if labelled and classes is None and (parts := part_folders(folder)):
        raise UserError(
            f"{printable(folder)}: expected sub-folders named by class, found parts of a set "
            f"({listed_names(parts.values())}): use dl.data.open_data(folder, world)"
        )
    entries = sorted(images_below(folder), key=lambda entry: os.fsencode(entry[0]))
    folders = sub_folders(folder)
    if not entries:
        empty = "an empty folder" if not visible(folder) else "no such file"
        raise UserError(f"{printable(folder)}: {needs}; found {empty}")
    files, stamps = [file for file, _ in entries], [now for _, now in entries]
    stray = [file for file in files if os.sep not in file]
    names = [file.split(os.sep)[0] for file in files if os.sep in file]
    used, problem = set(names), None
    if not names:
        problem = f"{needs}; found images ({printable(stray[0])}) and no class sub-folders"
    elif stray:
        problem = f"{printable(stray[0])} is outside the class sub-folders: move it into one"
    elif classes is None and (unused := [name for name in folders if name not in used]):
        problem = f"sub-folder {printable(unused[0])} has no images: add images or remove it"
    elif classes is not None and (unknown := sorted(used - set(classes), key=os.fsencode)):
        problem = (
            f"sub-folder {printable(unknown[0])} is not one of the classes "
            f"({name_list(classes)}){did_you_mean(unknown[0], classes)}"
        )
    if problem and labelled:
        raise UserError(f"{printable(folder)}: {problem}")
    labels = None
    if not problem:
        classes = folders if classes is None else classes
        label = {name: i for i, name in enumerate(classes)}
        labels = np.array([label[name] for name in names], np.int64)
    return Listing(files, stamps, labels, None, list(classes or []), problem if names else None)


def images_below(
    folder: str, prefix: str = "", ancestors: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[str, Stamp]]:
    """Yield (relative path, Stamp) of each image file below a folder, in any order.

    Raises UserError if a folder cannot be read, or a link leads to a missing file. `prefix` is the
    path of `folder` relative to the folder where the search started, and `ancestors` are (device,
    inode) of the folders that contain it, to detect cycles of links.
    """
    try:
        if not is_remote(folder):
            status = os.stat(folder)
            if (inode := (status.st_dev, status.st_ino)) in ancestors:  # a link to a parent folder
                return
            ancestors = (*ancestors, inode)
        for entry in visible(folder):
            relative = os.path.join(prefix, entry.name)
            if entry.is_dir():
                yield from images_below(entry.path, relative, ancestors)
            elif entry.name.lower().endswith(SUFFIXES):
                try:
                    now = entry.stamp if isinstance(entry, Entry) else stamp(entry.stat())
                    if now is not None:  # only folders of a store have none
                        yield relative, now
                except FileNotFoundError:
                    raise UserError(f"{printable(entry.path)}: a link to a missing file") from None
    except OSError as e:
        raise UserError(f"{printable(folder)}: the folder cannot be read: {reason(e)}") from None


def visible(folder: str) -> list[os.DirEntry[str] | Entry]:
    """Return the entries of a folder, except hidden entries such as .DS_Store."""
    return [entry for entry in scan(folder) if not entry.name.startswith(".")]


def sub_folders(folder: str) -> list[str]:
    """Return the names of a folder's visible sub-folders, sorted by bytes."""
    return sorted((e.name for e in visible(folder) if e.is_dir()), key=os.fsencode)


def check_folder(folder: str, option: str | None = None) -> None:
    """Raise UserError if a folder cannot be listed.

    If the folder does not exist, the message suggests a similar name. `option` is the command-line
    option that named the folder.
    """
    prefix = f"{option} {printable(folder)}" if option else printable(folder)
    if is_remote(folder):
        check_remote(folder, option)
    elif not exists(folder):
        parent, name = os.path.split(os.path.abspath(folder))
        try:
            candidates = [entry.name for entry in visible(parent) if entry.is_dir()]
        except OSError:
            candidates = []
        candidates += ["digits"] if option else []
        raise UserError(f"{prefix}: no such folder{did_you_mean(name, candidates)}")
    if not is_folder(folder):
        raise UserError(f"{prefix}: expected a folder, found a file")
    try:
        visible(folder)
    except OSError as e:
        raise UserError(f"{prefix}: the folder cannot be read: {reason(e)}") from None


def is_image_file(entry: os.DirEntry[str] | Entry) -> bool:
    """Return whether an entry of a folder is an image file, judged by its name."""
    return entry.name.lower().endswith(SUFFIXES) and not entry.is_dir()


def part_folders(folder: str) -> dict[str, str]:
    """Return {part: name of its sub-folder} of a folder that is divided into parts.

    The folder must contain train/ and another sub-folder with one of the `PART_NAMES`. A class may
    also be called "train". Therefore, train/ must contain sub-folders but no images. The result is
    {} for any other folder. Raises UserError if another sub-folder contains images, or if two
    sub-folders are the same part.
    """
    parts: dict[str, str] = {}
    other_names, repeated = [], []
    for name in sub_folders(folder):
        part = PART_NAMES.get(name.lower())
        if part is None:
            other_names.append(name)
        elif parts.setdefault(part, name) != name:
            repeated.append((parts[part], name))
    if "train" not in parts or len(parts) == 1 or not _has_only_folders(folder, parts["train"]):
        return {}
    parts = {part: parts[part] for part in PARTS if part in parts}
    if repeated:
        first, second = map(printable, repeated[0])
        raise UserError(
            f"{printable(folder)}: found {first}/ and {second}/, which name the same part: keep "
            "one of them"
        )
    for name in other_names:
        if next(images_below(os.path.join(folder, name)), None) is not None:
            raise UserError(
                f"{printable(folder)}: found images in {printable(name)}/ beside "
                f"{listed_names(parts.values())}: expected only train/, validation/ (or val/) and "
                "test/; move the others elsewhere, or name the folders separately, such as --data "
                f"{printable(os.path.join(folder, parts['train']))}"
            )
    return parts


def listed_names(folders: Iterable[str]) -> str:
    """Return the names of sub-folders as one text, such as "train/, test/"."""
    return ", ".join(f"{printable(name)}/" for name in folders)


def _has_only_folders(folder, name):
    entries = visible(os.path.join(folder, name))
    return any(e.is_dir() for e in entries) and not any(map(is_image_file, entries))


def _is_split(path: str, head: bytes, option: str) -> bool:
    """Return whether a folder is divided into parts; see `part_folders`.

    Raises UserError if train/ is the only sub-folder and contains classes, or as in `part_folders`.
    """
    if part_folders(path):
        return True
    names = sub_folders(path)
    is_train = len(names) == 1 and PART_NAMES.get(names[0].lower()) == "train"
    if is_train and _has_only_folders(path, names[0]):
        raise UserError(
            f"{option} {printable(path)}: found {printable(names[0])}/ but no test/; name the "
            f"folder itself: {option} {printable(os.path.join(path, names[0]))}"
        )
    return False


def _open_folder(folder: str, world: World, options: OpenOptions) -> ImageFolder:
    return ImageFolder(
        folder,
        world,
        classes=options.classes,
        labelled=options.labelled,
        preprocess=options.preprocess,
    )


def _open_part(path: str, part: str, world: World, options: OpenOptions) -> ImageFolder:
    with listed(path):
        name = on_rank_0(world, lambda: part_folders(path)[part])
    return _open_folder(os.path.join(path, name), world, options)


TRAIN_AND_TEST = format_of_parts(
    "train and test folders",
    recognizes=_is_split,
    open_part=_open_part,
    parts=lambda path: list(part_folders(path)),
)
CLASS_FOLDERS = format_of_parts(
    "class folders",
    recognizes=lambda path, head, option: True,
    open_part=lambda path, part, world, options: _open_folder(path, world, options),
)
