"""The least time of a training step: its products at the GPU's rate, its bytes at the memory's.

Products are those of forward, backward-data (of all layers but the first) and backward-weights,
two operations each. Bytes are the convolutions' float32 outputs times the passes over them: 9 if
batch normalization and ReLU are applied while loading and their sums taken while storing, 13 if
they are passes of their own. Data that stay in the second-level cache cost less.
"""

import math
from typing import NamedTuple

FUSED, APART = 9, 13  # passes over the convolutions' outputs


class Rates(NamedTuple):
    """Bytes/s of a copy, reads and writes counted, and FLOP/s by kind of product."""

    copy: float
    fp32: float
    tf32: float
    bf16: float
    source: str


GPU_RATES = {
    "H200": Rates(
        4.3e12, 67e12, 495e12, 790e12, "copy and bf16 measured, float32 and TF32 of the datasheet"
    ),
}


class Work(NamedTuple):
    """Work of a step for each image, and the number of learnables.

    `products` counts the multiplications of forward, `first` those of the first layer, and
    `outputs` the numbers that convolutions put out.
    """

    products: int
    first: int
    outputs: int
    learnables: int

    @property
    def flop(self):
        """Operations of a step for each image."""
        return 2 * (3 * self.products - self.first)


def rates(name, measured=None):
    """Return the Rates of a GPU by its name, or `measured` if they are not listed."""
    return next((rates for key, rates in GPU_RATES.items() if key in name), measured)


def work(net):
    """Return the Work of a Network's step."""
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


def milliseconds(step: Work, batch: int, rate: Rates, precision: str) -> dict[str, float]:
    """Return the least times of a step in ms.

    Parameters
    ----------
    step : Work
        Work for each image.
    batch : int
        Images of the mini-batch.
    rate : Rates
        Rates of the GPU.
    precision : str
        "fp32" (three TF32 products each), "tf32", "bf16" (its activations too) or "fma".

    Returns
    -------
    dict of str to float
        "products", "bytes fused", "bytes apart", and "floor", the larger of products and fused
        bytes.
    """
    speed = {"fp32": rate.tf32 / 3, "tf32": rate.tf32, "bf16": rate.bf16, "fma": rate.fp32}
    size = 2 if precision == "bf16" else 4
    products = step.flop * batch / speed[precision] * 1e3
    fused, apart = (step.outputs * batch * size * n / rate.copy * 1e3 for n in (FUSED, APART))
    return {
        "products": products,
        "bytes fused": fused,
        "bytes apart": apart,
        "floor": max(products, fused),
    }
