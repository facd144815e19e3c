"""What a training step takes at least: its products at the GPU's rate, its bytes at the memory's.

Products: forward, backward-data (of all layers but the first) and backward-weights, two operations
each. Bytes: the outputs of the convolutions, float32, each written and read so many times as the
step cannot do without: 9 where batch normalization and ReLU are applied while loading and their
sums taken while storing, 13 where they are passes of their own. What stays in the second-level
cache costs less than that.
"""

import math
from typing import NamedTuple

FUSED, APART = 9, 13  # passes over the convolutions' outputs


class Rates(NamedTuple):
    """Bytes/s of a copy (read and written both counted), FLOP/s by kind of product."""

    copy: float
    fp32: float
    tf32: float
    bf16: float
    source: str


KNOWN = {
    "H200": Rates(
        4.3e12, 67e12, 495e12, 790e12, "copy and bf16 measured, float32 and TF32 of the datasheet"
    ),
}


class Work(NamedTuple):
    """Of a step, for each image: multiplications forward, those of the first layer, numbers that
    convolutions put out; and the learnables of the network."""

    products: int
    first: int
    outputs: int
    learnables: int

    @property
    def flop(self):
        """Operations of a whole step for each image."""
        return 2 * (3 * self.products - self.first)


def rates(name, measured=None):
    """The Rates of a GPU by its name; those measured on it where it is not known; else None."""
    return next((found for key, found in KNOWN.items() if key in name), measured)


def work(net):
    """The Work of a Network's step."""
    products, outputs = [], 0
    for layer, shape in zip(net.layers, net.output_shapes, strict=True):
        weight = net.parameters.get(f"{layer.name}.weight")
        if weight is None or weight.ndim < 2:
            continue
        pixels = math.prod(shape[1:])
        products.append(pixels * weight.size)
        outputs += math.prod(shape) if weight.ndim == 4 else 0
    learnables = sum(count for *_, count in net.table())
    return Work(sum(products), products[0], outputs, learnables)


def milliseconds(of, batch, rate, precision):
    """{"products", "bytes fused", "bytes apart", "floor"} of a step, in ms.

    precision: "fp32" (three TF32 products each), "tf32", "bf16" (its activations too) or "fma".
    floor: the larger of products and fused bytes.
    """
    speed = {"fp32": rate.tf32 / 3, "tf32": rate.tf32, "bf16": rate.bf16, "fma": rate.fp32}
    size = 2 if precision == "bf16" else 4
    products = of.flop * batch / speed[precision] * 1e3
    fused, apart = (of.outputs * batch * size * n / rate.copy * 1e3 for n in (FUSED, APART))
    return {
        "products": products,
        "bytes fused": fused,
        "bytes apart": apart,
        "floor": max(products, fused),
    }
