"""A datastore of image files listed in a CSV table. `table_files` describes the columns."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mpidl.data.datastore import counted
from mpidl.data.formats.format import PARTS, OpenOptions, World, check_part, format_of_parts
from mpidl.data.formats.image_list import ImageList
from mpidl.data.formats.table_files import Table
from mpidl.data.transforms.preprocess import AS_IT_IS, Preprocess
from mpidl.files import on_rank_0
from mpidl.matlab_names import explain_arguments
from mpidl.text import printable


class ImageTable(ImageList):
    """A datastore of the image files in a CSV file, with their labels or targets.

    The table is UTF-8 and has a header. The column `path` has the paths of the image files relative
    to the folder of the table. Labels or targets come from one of the following columns:

    - `label`: the name of the image's class. Other columns are then ignored. The classes are the
      class names in the training rows, sorted by bytes, or by value if all are whole numbers.
    - `labels`: names of several classes, joined by a separator. The target is then float32 (K,): 1
      for the classes of the image and 0 for other classes.
    - otherwise all other columns, which hold numbers. R columns give targets of shape (R,), and one
      column gives targets of shape (). If there are several columns and all of them hold only 0 and
      1, the column names are the class names.

    The optional column `split` has the values train, validation or test. With a world, construction
    is collective: rank 0 reads the table and broadcasts the results.

    Parameters
    ----------
    path : path-like
        The table.
    world : World, optional
        The ranks that open the table together.
    part : {"train", "validation", "test"} or None
        Rows to open, by the column `split`. Without this column, "train" opens all rows. None
        always opens all rows.
    classes : sequence of str, optional
        Class names of the training set, to which labels are mapped.
    labelled : bool
        Whether labels or targets are required.
    separator : str, optional
        Separator of the names in the column `labels`. By default ";" or "|", whichever occurs in
        the table.
    preprocess : Preprocess or None
        Conversion to apply to the images, as for `ImageFolder`.

    Attributes
    ----------
    path : str
        The table.
    unlabelled : str or None
        Reason why there are no labels or targets, if `labelled` is False and a cell is invalid.

    Raises
    ------
    UserError
        If the table or an image file cannot be read, or if a cell is invalid. The message names the
        file, the line and the column.
    """

    @explain_arguments
    def __init__(
        self,
        path: str | os.PathLike[str],
        world: World = None,
        part: str | None = "train",
        *,
        classes: Sequence[str] | None = None,
        labelled: bool = True,
        separator: str | None = None,
        preprocess: Preprocess | None = AS_IT_IS,
    ):
        self.path, self.part = os.fspath(path), part
        if part is not None:
            check_part(part, self.path, PARTS)
        super().__init__(
            os.path.dirname(self.path),
            world,
            lambda: Table(self.path).select(part, classes, labelled, separator),
            preprocess,
        )

    def describe(self) -> str:
        part = "" if self.part in (None, "train") else f", {self.part}"
        return f"{printable(self.path)}{part}: {counted(self)}"


def _open_part(path: str, part: str | None, world: World, options: OpenOptions) -> ImageTable:
    return ImageTable(
        path,
        world,
        part,
        classes=options.classes,
        labelled=options.labelled,
        preprocess=options.preprocess,
    )


def _open_test_data(path: str, world: World, options: OpenOptions) -> ImageTable:
    """Open the test rows, which training rows never replace, or all rows without `split`."""
    part = "validation" if options.option == "--validation-data" else "test"
    is_split = on_rank_0(world, lambda: bool(Table(path).parts()))
    return _open_part(path, part if is_split else None, world, options)


FORMAT = format_of_parts(
    "table",
    recognizes=lambda path, head, option: path.lower().endswith(".csv"),
    open_part=_open_part,
    parts=lambda path: list(Table(path).parts()),
    noun="a .csv table",
)._replace(open_test_data=_open_test_data)
