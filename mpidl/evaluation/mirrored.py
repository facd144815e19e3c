"""Test-time augmentation: average the scores of an image over its mirror images."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast

from mpidl import backends
from mpidl.core.blocks import Blocked
from mpidl.errors import UserError
from mpidl.nn import Network
from mpidl.nn.layers import Layer, Softmax

Flips: TypeAlias = Literal["none", "x", "y", "xy"]

# For each choice, the mirror operations: 0 none, 1 left to right, 2 top to bottom, 3 both.
TURNS: dict[str, tuple[int, ...]] = {"none": (0,), "x": (0, 1), "y": (0, 2), "xy": (0, 1, 2, 3)}


class MirroredNetwork:
    """A network whose outputs are means over the mirror images of its input.

    The flips are left to right ("x", 2 passes), top to bottom ("y", 2 passes), or both ("xy", 4).
    Outputs that are images or pixel scores are mirrored back before averaging.
    """

    def __init__(self, net: Network, flips: Flips) -> None:
        self.net, self.turns = net, TURNS[flips]

    def __call__(self, images: Blocked) -> Blocked:
        """Return the mean of the network's outputs."""
        return self._mean(self.net, images)

    def logits(self, images: Blocked, activation: type[Layer] = Softmax) -> Blocked:
        """Return the mean of the scores before softmax; see `Network.logits`."""
        return self._mean(lambda mirror_image: self.net.logits(mirror_image, activation), images)

    def _mean(self, function, images):
        backend, total, value = backends.of_value(images), None, images
        for number, turn in enumerate(self.turns, 1):
            lanes = backend.mirror(images.lanes, turn) if turn else images.lanes
            value = function(images.like(lanes)).stored()
            factor = 1 / number if number == len(self.turns) else 1.0
            back = turn if len(value.image_shape) == 3 else 0
            total = backend.mirror(value.lanes, back, total, factor)
        return value.like(total)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)


def mirrored(net: Network, flips: Flips) -> Network:
    """Return a network that averages the outputs of `net` over mirror images, or `net` itself for
    "none". Raises UserError if `flips` is not a choice of `MirroredNetwork`.
    """
    if flips not in TURNS:
        raise UserError(f"test_flips must be {', '.join(TURNS)}, got {flips}")
    return net if flips == "none" else cast(Network, MirroredNetwork(net, flips))
