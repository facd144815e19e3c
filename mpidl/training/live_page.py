"""Serve the live page of a run while the run trains. Only rank 0 imports the page's modules."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mpidl.files import call_together
from mpidl.ranks.world import World

if TYPE_CHECKING:
    from mpidl.report.live.address import Address


def open_page(world: World, port: int | None, option: str) -> Address | None:
    """Open the socket of the page on rank 0, and return its address there. Collective.

    Parameters
    ----------
    world : World
        The ranks of the run.
    port : int or None
        The port; 0 selects a free port, and None opens no page.
    option : str
        The option that sets the port, for error messages.

    Raises
    ------
    UserError
        On all ranks, if Bokeh is missing or the port cannot be used.
    """

    def listen():
        if port is None or world.rank:
            return None
        from mpidl.report.live import address

        address.need_bokeh(option)
        return address.listen(port=port, option=option)

    return call_together(world, listen)


@contextlib.contextmanager
def served(
    page: Address | None, folder: str | os.PathLike[str], show: Callable[[str], object]
) -> Iterator[None]:
    """Serve the page of a run in a separate process within the block, unless `page` is None.

    `show` receives the lines that tell the user how to open the page.
    """
    if page is None:
        yield
        return
    from mpidl.report.live.page_process import PageProcess

    for line in page.lines():
        show(line)
    with contextlib.closing(PageProcess(os.fspath(folder), page)):
        yield
