"""Sets that are read whole: their images lie in memory once per node."""

import math

import numpy as np

from mpidl.errors import UserError
from mpidl.files import on_rank_0
from mpidl.text import printable


def once_per_node(world, load, where):
    """(images, rest) of load(), the images in memory that the ranks of a node share. Collective.

    where: the path, for a message.
    The first rank of each host loads, the others would only repeat it; `rest` is rank 0's. Should
    two nodes go by one host name, the flag says that the second is still without, and its ranks
    load too: all of them write the same bytes. Where the node has no room to share, each rank has a
    copy to itself.
    """
    if world is None:
        return load()
    own = {}

    def load_and_keep():
        own["images"], rest = load()
        return own["images"].shape, own["images"].dtype.str, rest

    shape, dtype, rest = on_rank_0(world, load_and_keep)

    def read():
        mine = own.pop("images", None)
        mine = load()[0] if mine is None else mine
        if mine.shape != shape:
            raise UserError(
                f"{printable(where)}: images of shape {mine.shape} on {world.host}, {shape} on "
                f"{world.hosts[0]}"
            )
        return mine

    if math.prod(shape) * np.dtype(dtype).itemsize > world.available_shared_bytes() // 2:
        return _together(world, read), rest
    images = world.shared_array(shape, np.dtype(dtype))
    there = world.shared_array((1,), np.uint8)

    def fill():
        if not there[0]:
            images[...] = read()
            there[0] = 1

    first = world.hosts.index(world.host) == world.rank
    _together(world, fill if first else lambda: None)
    _together(world, fill)
    return images, rest


def _together(world, function):
    """function() on this rank; where any rank's raises UserError, all raise it."""
    result = error = None
    try:
        result = function()
    except UserError as e:
        error = e
    world.raise_if_any(error)
    return result
