"""Load images into shared memory, with one copy per host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidl.errors import UserError
from mpidl.files import call_together, on_rank_0
from mpidl.text import printable


def once_per_node(
    world: Any, load: Callable[[], tuple[np.ndarray, Any]], path: str
) -> tuple[np.ndarray, Any]:
    """Load images once per host, into memory that the ranks of the host share.

    Collective. `load` returns (images, rest), and the result has rank 0's rest, such as labels.
    Images are uint8, or floats that become float32. The first rank of each host loads them. If rank
    0's images need more than half of the free shared memory, each rank loads its own copy instead.
    All ranks raise UserError if `load` raises it on any rank, or if two hosts load images of
    different shapes.
    """

    def load_pixels():
        images, rest = load()
        dtype = np.uint8 if images.dtype == np.uint8 else np.float32
        with np.errstate(over="ignore"):  # `read_images` reports infinite pixels later
            return np.ascontiguousarray(images, dtype), rest

    if world is None:
        return load_pixels()
    loaded: dict[str, np.ndarray] = {}

    def load_and_keep():
        loaded["images"], rest = load_pixels()
        return loaded["images"].shape, loaded["images"].dtype.str, rest

    shape, dtype, rest = on_rank_0(world, load_and_keep)

    def read():
        images = loaded.pop("images", None)
        images = load_pixels()[0] if images is None else images
        if images.shape != shape:
            raise UserError(
                f"{printable(path)}: expected the same images on all hosts, found shape "
                f"{images.shape} on {world.host}, {shape} on {world.hosts[0]}"
            )
        return images

    if math.prod(shape) * np.dtype(dtype).itemsize > world.available_shared_bytes() // 2:
        return call_together(world, read), rest
    images = world.shared_array(shape, np.dtype(dtype))
    filled = world.shared_array((1,), np.uint8)

    def fill():
        if not filled[0]:
            images[...] = read()
            filled[0] = 1

    first = world.hosts.index(world.host) == world.rank
    call_together(world, fill if first else lambda: None)
    # If two machines have the same host name, the second machine has not loaded the images yet. All
    # ranks of that machine now load the images and write the same bytes.
    call_together(world, fill)
    return images, rest
