"""A set of image files that a command line lists."""

from __future__ import annotations

from collections.abc import Sequence

from mpidl.data.datastore import counted
from mpidl.data.formats.format import World
from mpidl.data.formats.image_files import SUFFIXES, read_file
from mpidl.data.formats.image_list import ImageList, Listing
from mpidl.text import printable


class PictureFiles(ImageList):
    """A datastore of image files without labels, in the order of their paths."""

    def __init__(self, paths: Sequence[str], world: World):
        def list_files() -> Listing:
            stamps = [read_file(path)[1] for path in paths]
            return Listing(list(paths), stamps, None, None, [], None)

        super().__init__("", world, list_files, None)

    def describe(self) -> str:
        extra = f" and {len(self) - 1} more" if len(self) > 1 else ""
        return f"{printable(self.files[0])}{extra}: {counted(self)}"


def are_pictures(paths: Sequence[str]) -> bool:
    """Return whether all paths are names of image files."""
    return all(path.lower().endswith(SUFFIXES) for path in paths)
