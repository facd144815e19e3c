"""`python -m benchmarks kernels`: compare each pass of each layer with the limits of the core.

GFLOP/s are effective: the number of operations of the direct algorithm (two per multiply-add)
divided by the time. Winograd kernels can therefore exceed the peak. Passes that mostly move memory
are reported in GB/s and compared with the speed of a copy. Their bytes count once each array that
must be read or written. Large fully connected layers are also compared with one BLAS sgemm of the
whole mini-batch, called through NumPy.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks import machine, report, subject, turns
from mpidl import backends
from mpidl.backends.cpu import builds
from mpidl.blocks import LANES, Blocked, OneRank, share
from mpidl.deferred import DeferredInput
from mpidl.nn import Conv2D, Network
from mpidl.training.options import configuration

# 3x3 convolutions for comparing machines and versions: (channels, height = width).
SHAPES = ((20, 24), (32, 32), (64, 16), (128, 8))
# AlexNet's first fully connected layer: inputs, outputs, images.
DENSE = (9216, 4096, 32)
ENOUGH = 0.02  # minimum duration of a measurement in seconds
UNITS = {  # units of results, and how the table prints them
    "ms": "{:.3f}",
    "gflops": "{:.1f}",
    "share_of_peak": "{:.0%}",
    "gbs": "{:.1f}",
    "share_of_copy": "{:.0%}",
    "sgemm_ratio": "{:.2f}",
}
HEAD = ("layer", "pass", "ms", "GFLOP/s", "of peak", "GB/s", "of copy", "time / sgemm")


class Case(NamedTuple):
    """One pass of one layer.

    Parameters
    ----------
    layer : str
        Name of the layer.
    name : str
        Name of the pass.
    shape : tuple
        Shape and options. Cases with the same pass and shape are measured only once.
    run : callable
        Runs the pass.
    flops : int
        Number of operations, or 0 if the pass is measured in bytes.
    bytes : int
        Bytes read and written.
    sgemm : callable or None
        Computes the same product with BLAS, for comparison.
    """

    layer: str
    name: str
    shape: tuple
    run: Callable
    flops: int
    bytes: int
    sgemm: Callable | None = None


def main(options: argparse.Namespace) -> dict:
    """Run the sub-command and return its record."""
    machine.refuse_launcher("kernels")
    notes = subject.configure(options)
    options.network = ", ".join(options.networks)
    text = f"{machine.arithmetic()}, medians of {options.rounds} rounds"
    subject.print_head(options, text, notes)
    yardsticks = Yardsticks(options.threads)
    tables: dict = {name: {} for name in UNITS}
    measured = {}
    for network in options.networks:
        rows = []
        for case in cases(network, options):
            key = (case.name, *case.shape)
            if key not in measured:
                measured[key] = measure(case, yardsticks, options.rounds)
                rows.append(table_row(case, measured[key]))
            for name, value in measured[key].items():
                tables[name].setdefault(case.layer, {})[case.name] = value
        report.print_table([HEAD, *rows], left=2)
    print(f"(layers of the same shape are measured once)\n{yardsticks}")
    peak, copy = yardsticks.medians()
    names = ("networks", "batch_size", "threads", "winograd")
    record = report.header(options, configuration.versions_of("none"), *names)
    return record | {"peak_gflops": peak, "copy_gbs": copy, **tables}


def measure(case, yardsticks, rounds):
    """Measure a case in turns with its yardstick; return {unit: median over the rounds}.

    If the case has an sgemm, `sgemm_ratio` is our time divided by the sgemm's time. Our pass is
    faster if the ratio is below 1.
    """
    times, sgemm_times, rates = [], [], []
    our_seconds = _repeated(case.run)
    sgemm_seconds = case.sgemm and _repeated(case.sgemm)
    for _ in range(rounds):
        times.append(our_seconds())
        if sgemm_seconds:
            sgemm_times.append(sgemm_seconds())
        rates.append(yardsticks.products() if case.flops else yardsticks.copy())
    our_rates = (case.flops or case.bytes) / np.array(times)
    share = None if None in rates else report.median(our_rates / np.array(rates))
    figures = {
        "ms": report.median(times) * 1e3,
        "gflops" if case.flops else "gbs": report.median(our_rates) / 1e9,
        "share_of_peak" if case.flops else "share_of_copy": share,
    }
    if sgemm_times:
        figures["sgemm_ratio"] = report.median(np.array(times) / np.array(sgemm_times))
    return figures


def _repeated(run):
    """Return a function that repeats `run` for ENOUGH seconds and returns mean seconds per call."""
    run()
    count = max(1, min(1000, round(ENOUGH / max(turns.seconds(run), 1e-9))))

    def repeat():
        for _ in range(count):
            run()

    return lambda: turns.seconds(repeat) / count


def table_row(case, figures):
    """Return the table row of a case, with the columns of HEAD."""
    texts = (
        "" if figures.get(name) is None else text.format(figures[name])
        for name, text in UNITS.items()
    )
    return [case.layer, case.name, *texts]


class Yardsticks:
    """Peak rates of the core for products and for copies. They are measured next to each case."""

    def __init__(self, threads):
        self.threads, self.kernels = threads, builds.kernels()
        self.flops, self.copies = [], []
        self.factors = np.repeat(np.array([0.999, 0.001], np.float32), LANES)
        self.array = np.ones(16 << 20, np.float32)  # 64 MiB; its copy needs another 64 MiB
        self.target = np.ones_like(self.array)

    def products(self):
        """Return the measured FLOP/s of all cores in use, or None without C kernels."""
        if self.kernels is None:
            return None
        self.factors[:LANES] = 0.999
        start = time.perf_counter()
        counted = self.kernels.fma_peak(1_000_000, self.factors) * self.threads
        self.flops.append(counted / (time.perf_counter() - start))
        return self.flops[-1]

    def copy(self):
        """Return the measured bytes/s of a copy by one core, because all cores share the memory."""
        start = time.perf_counter()
        if self.kernels is None:
            np.copyto(self.target, self.array)
        else:
            self.kernels.copy(self.array, self.target, self.array.size)
        self.copies.append(2 * self.array.nbytes / (time.perf_counter() - start))
        return self.copies[-1]

    def medians(self):
        """Return the medians (GFLOP/s, GB/s). A rate that was not measured is None."""
        return tuple(np.median(x) / 1e9 if x else None for x in (self.flops, self.copies))

    def __str__(self):
        flops, copy = self.medians()
        peak = "not measured: no C kernels" if flops is None else f"{flops:.1f} GFLOP/s"
        moved = "not measured" if copy is None else f"{copy:.1f} GB/s read and written"
        return f"peak of multiply-adds: {peak}; copy of 64 MiB: {moved}"


def cases(network, options):
    """Yield the Cases of a network's layers; "shapes" stands for SHAPES, "dense" for DENSE."""
    if network == "dense":
        yield from _large_dense(options.threads)
        return
    if network != "shapes":
        net = subject.network(network, options.image, options.seed)
        shapes = [net.input_shape, *net.output_shapes]
        for i, (layer, shape) in enumerate(zip(net.layers, shapes, strict=False)):
            yield from _cases(f"{network}/{layer.name}", layer, shape, options, first=i == 0)
        return
    for channels, side in SHAPES:
        layer = Conv2D(3, channels, padding=1, name="conv")
        name = f"{channels} at {side}x{side}"
        yield from _cases(name, layer, (channels, side, side), options)


def _cases(name, layer, shape, options, first=False):
    """Yield a Case for each pass of a layer, on random values; a first layer has no dx pass."""
    batch = share(options.batch_size, OneRank())
    numbers = np.random.default_rng(0)

    def random(*size):
        return numbers.standard_normal(size, np.float32)

    built = Network([layer], shape)
    (layer,) = built.layers
    x = random(batch.blocks, *shape, LANES)
    dy = random(batch.blocks, *built.output_shape, LANES)
    backend = backends.of_value(Blocked(x, batch))
    weights = {k.rpartition(".")[2]: v for k, v in built.parameters.items()}
    arguments = {k: v for k, v in layer.spec().items() if k != "name"}
    key = (shape, *map(str, arguments.items()))
    passes = FAMILIES.get(type(layer).__name__, _no_passes)
    for case, run, flops, moved in passes(backend, layer, x, dy, weights, batch):
        if not (first and case == "dx"):
            yield Case(name, case, key, run, flops, moved)


def _no_passes(*_):
    return ()


def _conv(backend, layer, x, dy, weights, batch):
    weight, bias = weights["weight"], weights["bias"]
    args = subject.conv_args(layer)
    counts, tree = batch.counts(), batch.tree
    flops = 2 * weight[0].size * dy.size

    def backward(*needs):
        return lambda: backend.conv2d_backward(dy, x, weight, *args, counts, tree, needs)

    yield "forward", lambda: backend.conv2d(x, weight, bias, *args), flops, 0
    yield "dx", backward(True, False, False), flops, 0
    yield "dweight", backward(False, True, False), flops, 0
    if not backend.fuses_convolutions:
        return

    def source(values):
        channels = values.shape[1]
        return DeferredInput(values, *(np.full(channels, v, np.float32) for v in (0.1, 1.1, 0.2)))

    below, above = source(x), source(dy.copy())
    after = (above, *(np.ones(dy.shape[1], np.float32),) * 3)

    # fused as in the training step: normalization and ReLU, and the moments for the next layer
    def fused_forward():
        return backend.conv2d_moments(below, weight, bias, *args, counts, tree)

    def fused_backward():
        needs = (True,) * 3
        return backend.conv2d_backward(dy, below, weight, *args, counts, tree, needs, after, True)

    yield "fused forward", fused_forward, flops, 0
    yield "fused backward", fused_backward, 2 * flops, 0


def _batchnorm(backend, layer, x, dy, weights, batch):
    counts, tree = batch.counts(), batch.tree
    vector = np.linspace(0.5, 1.5, x.shape[1])
    yield "statistics", lambda: backend.moments(x, counts, tree), 0, x.nbytes
    yield "forward", lambda: backend.batchnorm(x, vector, vector, vector), 0, 2 * x.nbytes
    yield "sums", lambda: backend.batchnorm_sums(dy, x, vector, tree), 0, 2 * x.nbytes
    vectors = (vector,) * 4
    yield "dx", lambda: backend.batchnorm_dx(dy, x, *vectors, counts), 0, 3 * x.nbytes


def _relu(backend, layer, x, dy, weights, batch):
    yield "forward", lambda: backend.relu(x), 0, 2 * x.nbytes
    yield "dx", lambda: backend.relu_dx(dy, x), 0, 3 * x.nbytes


def _max_pool(backend, layer, x, dy, weights, batch):
    args = subject.pool_args(layer, x.shape[1:4])
    _, argmax = backend.max_pool2d(x, *args)
    moved = x.nbytes + dy.nbytes + argmax.nbytes
    yield "forward", lambda: backend.max_pool2d(x, *args), 0, moved
    yield "dx", lambda: backend.max_pool2d_dx(dy, argmax, x, *args, batch.tree), 0, moved


def _average_pool(backend, layer, x, dy, weights, batch):
    args = *subject.pool_args(layer, x.shape[1:4]), layer.count_padding
    moved = x.nbytes + dy.nbytes
    yield "forward", lambda: backend.average_pool2d(x, *args), 0, moved
    yield "dx", lambda: backend.average_pool2d_dx(dy, x, *args, batch.tree), 0, moved


def _dense(backend, layer, x, dy, weights, batch):
    x = x.reshape(len(x), -1, LANES)
    weight, bias = weights["weight"], weights["bias"]
    flops = 2 * weight.size * LANES * len(x)
    yield "forward", lambda: backend.dense(x, weight, bias), flops, 0
    yield "dx", lambda: backend.dense_dx(dy, weight), flops, 0
    yield "dweight", lambda: backend.dense_dweight(dy, x, batch.tree), flops, 0
    args = (dy, x, weight, batch.tree, (True,) * 3)
    yield "backward", lambda: backend.dense_backward(*args), 2 * flops, 0


def _large_dense(threads):
    """Yield the passes of DENSE. On one thread, each pass has an sgemm of all images."""
    features, outputs, images = DENSE
    batch = share(images, OneRank())
    numbers = np.random.default_rng(0)

    def random(*size):
        return numbers.standard_normal(size, np.float32)

    weight, x = random(outputs, features), random(batch.blocks, features, LANES)
    dy = random(batch.blocks, outputs, LANES)
    backend = backends.of_value(Blocked(x, batch))
    # one image per column, because no other layout is faster in BLAS
    flat, dflat = (v.swapaxes(0, 1).reshape(v.shape[1], images) for v in (x, dy))
    products = {"forward": (weight, flat), "dx": (weight.T, dflat), "dweight": (dflat, flat.T)}

    def sgemm(a, b):
        y = np.empty((len(a), b.shape[1]), np.float32)
        return lambda: np.matmul(a, b, out=y)

    weights = {"weight": weight, "bias": np.zeros(outputs, np.float32)}
    for name, run, flops, moved in _dense(backend, None, x, dy, weights, batch):
        if name in products:
            product = sgemm(*products[name]) if threads == 1 else None
            yield Case(f"{features} to {outputs}", name, DENSE, run, flops, moved, product)


FAMILIES = {
    "Conv2D": _conv,
    "BatchNorm": _batchnorm,
    "ReLU": _relu,
    "MaxPool2D": _max_pool,
    "AveragePool2D": _average_pool,
    "Dense": _dense,
}
