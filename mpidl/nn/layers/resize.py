"""The layer that resizes images."""

from __future__ import annotations

from dataclasses import field

from mpidl import ops
from mpidl.nn.layers.base import Built, Layer, LayerContext, Shape, Value, layer_class
from mpidl.ops import resize

__all__ = ["Resize2D"]


@layer_class
class Resize2D(Layer):
    """Resizing of images to a size, or by a scale.

    Parameters
    ----------
    size
        Size of the output, an integer or (rows, columns).
    scale
        Factor of the size, a number or (down, across), instead of `size`.
    mode
        "nearest" or "bilinear".
    coordinates, rounding
        Where the pixels of the output are in the input; see `ops.resize2d`. The defaults are those
        of PyTorch.
    """

    size: int | tuple[int, int] | None = None
    scale: float | tuple[float, float] | None = field(default=None, kw_only=True)
    mode: resize.Mode = field(default="nearest", kw_only=True)
    coordinates: resize.Coordinates | None = field(default=None, kw_only=True)
    rounding: resize.Rounding = field(default="floor", kw_only=True)

    def build(self, shape: Shape) -> Built:
        name = str(self.name)
        resize.checked_rule(name, self.mode, self.coordinates, self.rounding)
        outputs, _ = resize.output_size(name, shape, self.size, self.scale)
        return Built((shape[0], *outputs))

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.resize2d(
            x,
            self.size,
            scale=self.scale,
            mode=self.mode,
            coordinates=self.coordinates,
            rounding=self.rounding,
        )
