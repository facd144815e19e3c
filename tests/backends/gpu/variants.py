"""List the units that a GPU may compile: the units that networks load, and all other families."""

import re

import numpy as np

from benchmarks.gpu.compiling import Addresses, Collector
from benchmarks.mpidl_step import RecordedStep
from mpidl.backends import settings
from mpidl.backends.gpu import activation, array, conv, gates, kernels, launching, optimizer, pool
from mpidl.backends.gpu.recurrent import recurrence, recurrence_backward
from mpidl.backends.gpu.resample import resample
from mpidl.backends.gpu.sums import Counts
from mpidl.backends.reference.activation import FUNCTIONS
from mpidl.backends.shapes import Geometry, Windows
from mpidl.backends.taps import Taps
from mpidl.core import fold
from mpidl.core.blocks import LANES
from mpidl.ranks.world import World

# multiprocessors of V100, T4, A100, RTX A6000, H200 and RTX 5090
PROCESSORS = {"sm_70": 80, "sm_75": 40, "sm_80": 108, "sm_86": 84, "sm_90": 132, "sm_120": 170}
SHARED = {"sm_80": 166912, "sm_86": 101376, "sm_120": 101376}  # bytes of a block of threads
STEP = re.compile(r"f\((\w+), (\d), (\d)\)")  # (formula, numbers, arrays) in EACH_STEP
UNPADDED, PADDED = ((0, 0), (0, 0)), ((1, 1), (1, 1))

# (blocks, (C, H, W), (K, C/g, R, S), stride, padding, dilation, groups)
DIGITS = [
    (8, (1, 28, 28), (20, 1, 5, 5), (1, 1), UNPADDED, (1, 1), 1),
    (8, (20, 24, 24), (20, 20, 3, 3), (1, 1), PADDED, (1, 1), 1),
]
CIFAR = [
    (16, (3, 32, 32), (32, 3, 3, 3), (1, 1), PADDED, (1, 1), 1),
    (16, (32, 32, 32), (32, 32, 3, 3), (1, 1), PADDED, (1, 1), 1),
    (16, (32, 16, 16), (64, 32, 3, 3), (1, 1), PADDED, (1, 1), 1),
    (16, (64, 16, 16), (64, 64, 3, 3), (1, 1), PADDED, (1, 1), 1),
    (16, (64, 8, 8), (128, 64, 3, 3), (1, 1), PADDED, (1, 1), 1),
    (16, (128, 8, 8), (128, 128, 3, 3), (1, 1), PADDED, (1, 1), 1),
]
ODD = [
    (16, (3, 224, 224), (64, 3, 11, 11), (4, 4), ((2, 2), (2, 2)), (1, 1), 1),
    (1, (6, 9, 7), (10, 3, 3, 2), (2, 1), ((1, 0), (0, 2)), (1, 2), 2),
    (64, (24, 7, 7), (40, 24, 1, 1), (1, 1), UNPADDED, (1, 1), 1),
    (16, (144, 56, 56), (144, 1, 3, 3), (1, 1), PADDED, (1, 1), 144),
    (16, (96, 112, 112), (96, 1, 3, 3), (2, 2), PADDED, (1, 1), 96),
]


def units(architecture):
    """Return the Units that a GPU of this architecture, such as "sm_80", may compile."""
    number = int(architecture[3:])
    device = Collector(Addresses(architecture, PROCESSORS[architecture]))
    precision = settings.precision
    try:
        launching.open(device)
        layers_of_all = DIGITS + CIFAR + ODD
        for settings.precision, layers in (
            ("fp32", layers_of_all),
            ("tf32", DIGITS),
            ("bf16", layers_of_all),
        ):
            for layer in layers:
                _convolve(*layer)
        for channels in (3, 32):
            _pool(channels)
            _gates(channels)
            _resample(channels)
        for kind, gates in (("lstm", 4), ("gru", 3)):
            _recur(kind, gates)
        for function in FUNCTIONS:
            x = array.empty_lanes((1, 8, LANES))
            activation.elementwise_dx(function, activation.elementwise(function, x), x)
        for formula, numbers, arrays in STEP.findall(kernels.source("optimizer.cu")):
            w, ones = [array.empty((8,))], [1.0] * int(numbers)
            optimizer.optimizer_step(formula, w, w, [w] * int(arrays), ones, [0.0])
    finally:
        settings.precision = precision
        launching.open(None)
    loaded = {unit.family for unit in device.units}
    never_loaded = [
        f for f in kernels.families() if f not in loaded and kernels.NEEDS.get(f, 0) <= number
    ]
    all_units = [kernels.Unit(family) for family in never_loaded] + list(device.units)
    return all_units + _in_bf16(all_units)


def _in_bf16(all_units):
    """Return a unit of each family that computes with values of both types, for bfloat16."""
    firsts = {unit.family: unit for unit in reversed(all_units)}
    return [
        unit._replace(defines=(("BF16", 1), *unit.defines))
        for family, unit in sorted(firsts.items())
        if "TERMS" not in dict(unit.defines)
        and any(
            argument.elements is kernels.VALUES
            for arguments in kernels.signatures(kernels.source(f"{family}.cu")).values()
            for argument in arguments
        )
    ]


def units_of_steps(architecture, precision, settings_of_steps):
    """Return a Unit of each kind that recorded steps of (network, batch size) pairs load.

    Units of a kind differ only in the shape of the layer.
    """
    kinds = {}
    for network, batch in settings_of_steps:
        world, addresses = World(threads=None), Addresses(architecture, PROCESSORS[architecture])
        addresses.shared = SHARED.get(architecture, addresses.shared)
        before = settings.precision
        try:
            world.device, world.counts = launching.open(Collector(addresses)), Counts()
            recorded = RecordedStep(world, network, batch, precision, graphs=False)
            for launch in recorded.program.launches():
                family, defines = launch.unit
                kind = [define for define in defines if define[0] != "CONV_SHAPE"]
                kinds.setdefault((family, *kind), launch.unit)
        finally:
            launching.open(None)
            settings.precision = before
    return list(kinds.values())


def _convolve(blocks, image, filters, *numbers):
    geometry = Geometry(*numbers)
    tree = fold.Tree(blocks, ((0, blocks),), 0)
    x = array.empty_lanes((blocks, *image, LANES))
    weight = array.filters(np.zeros(filters, np.float32))
    y = conv.conv2d(x, weight, None, geometry)
    conv.conv2d_backward(y, x, weight, geometry, None, tree, (True, True, True))


def _gates(channels):
    x, gate = (array.empty_lanes((1, channels, *pixels, LANES)) for pixels in ((4, 4), (1, 1)))
    gates.multiply(x, gate)
    gates.multiply_dx(x, x, gate)


def _pool(channels):
    x, windows = array.empty_lanes((1, channels, 8, 8, LANES)), Windows((2, 2), (2, 2), UNPADDED)
    pool.max_pool2d(x, windows)
    pool.average_pool2d(x, windows, True)


def _recur(kind, gates):
    tree, units = fold.Tree(1, ((0, 1),), 0), 32
    x = array.empty_lanes((1, gates * units, 4, 1, LANES))
    weight = array.filters(np.zeros((gates * units, units, 1, 1), np.float32))
    y, record, _ = recurrence(kind, x, weight, None, [], False)
    needs = (True, True, False)
    recurrence_backward(kind, y, record, weight, None, [], False, 4, None, tree, needs)


def _resample(channels):
    taps = Taps(8, [[(0, 1.0)]])
    resample(array.empty_lanes((1, channels, 8, 8, LANES)), taps, taps)
