"""Note what a queue did to the images that train a network, for its later evaluations."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from mpidl.core.blocks import Blocked

if TYPE_CHECKING:
    from mpidl.nn.network import Network


def note(net: Network, images: Blocked) -> None:
    """Set the function and the normalization with which a queue made the images.

    A queue without a normalization divides pixels by 255. If the network expects something else,
    rank 0 warns once. Values that are not the images of a queue, such as the outputs of another
    network, leave a network as it is. Raises UserError if neither the queue nor the network says
    how to normalize the images.
    """
    source, world = images.batch.source, images.batch.world
    if source is None:
        net.input_function = None
    if source is None or source.image_shape != images.image_shape:
        return
    net.input_function = source.function
    if source.normalization is not None:
        net.normalization = source.normalization
    elif net.normalization is not None and source.function is None:
        net.normalization.need_known()
        if net.normalization.centre is not None and world.rank == 0:
            warnings.warn(
                f"the network expects the normalization {net.normalization.describe()}, but the "
                "MinibatchQueue divides pixels by 255: pass **net.input_transform() to the queue, "
                "or set net.normalization = None",
                stacklevel=1,  # one place, so that Python shows the warning once
            )
