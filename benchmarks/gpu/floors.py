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
    """Bytes/s of a copy, counting reads and writes, and FLOP/s by precision of the products.

    `architecture` and `processors` (number of multiprocessors) are known of the listed GPUs.
    """

    copy: float
    fp32: float
    tf32: float
    bf16: float
    source: str
    architecture: str = ""
    processors: int = 0

    def speeds(self) -> dict[str, float]:
        """Return FLOP/s by precision, as in `milliseconds`."""
        return {"fp32": self.tf32 / 3, "tf32": self.tf32, "bf16": self.bf16, "fma": self.fp32}


GPU_RATES = {
    "H200": Rates(
        4.3e12,
        67e12,
        495e12,
        790e12,
        "copy and bf16 measured; float32 and TF32 from the datasheet",
        "sm_90",
        132,
    ),
    "H100": Rates(
        3.0e12,
        67e12,
        495e12,
        790e12,
        "copy: 0.9 of the datasheet's 3.35 TB/s; bf16 as measured on an H200; float32 and TF32 "
        "from the datasheet",
        "sm_90",
        132,
    ),
    "A100": Rates(
        1.8e12,
        19.5e12,
        156e12,
        312e12,
        "copy: 0.9 of the datasheet's 2.04 TB/s; products from the datasheet",
        "sm_80",
        108,
    ),
}
# Share of the peak that mma.sync reaches, which the kernels use. Only wgmma reaches the peak of
# sm_90 (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024).
MMA = {"sm_80": 1.0, "sm_90": 0.62}
LAUNCH = 2e-6  # seconds between two dependent kernels of a CUDA graph, an estimate


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
    speed = rate.speeds()
    flop, pass_bytes = step.flop * batch, bytes_of_outputs(step, batch, precision)
    fused, apart = (
        floors.floor(flop, n * pass_bytes, speed[precision], rate.copy) for n in (FUSED, APART)
    )
    return {
        "products": fused.products * 1e3,
        "bytes fused": fused.bytes * 1e3,
        "bytes apart": apart.bytes * 1e3,
        "floor": fused.seconds * 1e3,
    }


def bytes_of_outputs(step: Work, batch: int, precision: str) -> int:
    """Return the bytes of the outputs of a mini-batch's convolutions."""
    return step.outputs * batch * (2 if precision == "bf16" else 4)


def of_launch(nbytes: float, products: float, unit: str, rate: Rates) -> floors.Floor:
    """Return the Floor of a launch without its overhead, LAUNCH.

    Parameters
    ----------
    nbytes, products : float
        Number of bytes read and written, and of products issued.
    unit : str
        Precision of the products, a key of `Rates.speeds`.
    rate : Rates
        Peak rates of the GPU. The kernels reach the part MMA of the peak of tensor cores.
    """
    share = 1.0 if unit == "fma" else MMA[rate.architecture]
    return floors.floor(2 * products, nbytes, share * rate.speeds()[unit], rate.copy)
