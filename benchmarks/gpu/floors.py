"""Compute a lower bound on the time of a training step from the GPU's peak rates.

The compute bound is the number of floating-point operations of the multiply-adds divided by the
GPU's peak FLOP/s. The operations include forward, backward-data (of all layers except the first)
and backward-weights, with two operations per multiply-add. The memory bound is the number of bytes
moved divided by the memory bandwidth. The number of bytes is the size of the convolutions' outputs
times the number of passes over these outputs. There are 9 passes if kernels apply batch
normalization and ReLU while loading, and accumulate batch statistics while storing. There are 13
passes if separate kernels do this work. The model ignores that data may stay in the L2 cache, so
the memory bound can exceed the actual time.
"""

import math
from typing import NamedTuple

from benchmarks import floors

FUSED, APART = 9, 13  # passes over the convolutions' outputs with fused and separate kernels


class Rates(NamedTuple):
    """Bytes/s of a copy, counting reads and writes, and FLOP/s by precision of the products."""

    copy: float
    fp32: float
    tf32: float
    bf16: float
    source: str


GPU_RATES = {
    "H200": Rates(
        4.3e12,
        67e12,
        495e12,
        790e12,
        "copy and bf16 measured; float32 and TF32 from the datasheet",
    ),
}


class Work(NamedTuple):
    """Work of a step per image, and the number of learnables.

    `products` is the number of multiply-adds in the forward pass, and `first` is the part of
    `products` in the first layer. `outputs` is the number of values that the convolutions compute.
    """

    products: int
    first: int
    outputs: int
    learnables: int

    @property
    def flop(self):
        """Number of floating-point operations of a step per image."""
        return 2 * (3 * self.products - self.first)


def rates(name, measured=None):
    """Return the listed Rates of a GPU by its name, or `measured` if it is not listed."""
    return next((rates for key, rates in GPU_RATES.items() if key in name), measured)


def work(net):
    """Return the Work of a training step of a Network."""
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
    """Return lower bounds on the time of a step in ms.

    Parameters
    ----------
    step : Work
        Work of the step per image.
    batch : int
        Number of images in the mini-batch.
    rate : Rates
        Peak rates of the GPU.
    precision : str
        "fp32" (emulated by three TF32 products), "tf32", "bf16" (activations are also bf16) or
        "fma" (float32 without tensor cores).

    Returns
    -------
    dict of str to float
        "products", "bytes fused" and "bytes apart", and "floor", which is the larger of "products"
        and "bytes fused".
    """
    speed = {"fp32": rate.tf32 / 3, "tf32": rate.tf32, "bf16": rate.bf16, "fma": rate.fp32}
    size = 2 if precision == "bf16" else 4
    flop, pass_bytes = step.flop * batch, step.outputs * batch * size
    fused, apart = (
        floors.floor(flop, n * pass_bytes, speed[precision], rate.copy) for n in (FUSED, APART)
    )
    return {
        "products": fused.products * 1e3,
        "bytes fused": fused.bytes * 1e3,
        "bytes apart": apart.bytes * 1e3,
        "floor": fused.seconds * 1e3,
    }
