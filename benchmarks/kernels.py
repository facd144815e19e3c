"""`python -m benchmarks kernels`: each layer and pass against what the core can do at most.

GFLOP/s are effective: the operations of the direct algorithm, two a product, over the time taken,
so that Winograd's may lie above the peak. What moves memory and computes little is given in GB/s,
each array it must read or write counted once, against the speed of a copy. A large fully connected
layer takes turns with BLAS, too: one sgemm of the whole mini-batch by NumPy.
"""

import time
from typing import NamedTuple

import numpy as np

from benchmarks import machine, subject, turns
from mpidl import backends
from mpidl.backends.cpu import builds
from mpidl.blocks import LANES, Blocked, DeferredInput, OneRank, share
from mpidl.errors import UserError
from mpidl.nn import Conv2D, Network
from mpidl.ops import check
from mpidl.training.options import configuration

# 3x3 convolutions to compare machines and versions by: (channels, height and width).
SHAPES = ((20, 24), (32, 32), (64, 16), (128, 8))
# A large fully connected layer, the first of AlexNet's: inputs, outputs, images.
DENSE = (9216, 4096, 32)
ENOUGH = 0.02  # seconds of a measurement
UNITS = ("ms", "gflops", "share_of_peak", "gbs", "share_of_copy", "sgemm_ratio")


class Case(NamedTuple):
    """One pass of one layer."""

    layer: str
    name: str  # of the pass
    same: tuple  # what cases of the same layer and shape have in common
    run: object
    flops: int  # 0 where it is bytes that count
    bytes: int
    sgemm: object = None  # the same product by BLAS, which takes turns with it


def main(chosen):
    """Run the sub-command; returns its exit code."""
    if machine.launched():
        raise UserError("kernels measures one process: run it without mpirun")
    notes = subject.configure(chosen)
    print(
        f"batch {chosen.batch_size}, {chosen.threads} thread(s), {machine.arithmetic()}, medians "
        f"of {chosen.rounds}"
    )
    for line in notes:
        print(f"warning: {line}")
    yardsticks = Yardsticks(chosen.threads)
    tables: dict = {name: {} for name in UNITS}
    print(
        f"{'layer':22}{'pass':16}{'ms':>10}{'GFLOP/s':>10}{'of peak':>9}{'GB/s':>9}{'of copy':>9}"
    )
    seen = {}
    for network in chosen.networks:
        for case in cases(network, chosen):
            same = (case.name, *case.same)
            if same not in seen:
                seen[same] = measure(case, yardsticks, chosen.rounds)
                print(_row(case, seen[same]), flush=True)
            for name, value in seen[same].items():
                tables[name].setdefault(case.layer, {})[case.name] = value
    print(f"(layers of the same shape are measured once)\n{yardsticks}")
    peak, copy = yardsticks.best()
    result = machine.facts(chosen, configuration.versions_of("none")) | {
        "networks": chosen.networks,
        "batch_size": chosen.batch_size,
        "threads": chosen.threads,
        "winograd": chosen.winograd,
        "peak_gflops": peak,
        "copy_gbs": copy,
        **tables,
    }
    machine.write_json(chosen.json, result)
    return 0


def measure(case, yardsticks, rounds):
    """{unit: value} of a case: medians of rounds in which it and its yardstick take turns.

    sgemm_ratio, where the case has an sgemm: our time over its, so that below 1 is faster.
    """
    times, products, best = [], [], []
    ours = _repeated(case.run)
    sgemm = case.sgemm and _repeated(case.sgemm)
    for _ in range(rounds):
        times.append(ours())
        if sgemm:
            products.append(sgemm())
        best.append(yardsticks.products() if case.flops else yardsticks.copy())
    rates = (case.flops or case.bytes) / np.array(times)
    found = {"ms": machine.median(times) * 1e3}
    found["gflops" if case.flops else "gbs"] = float(np.median(rates)) / 1e9
    share = None if None in best else float(np.median(rates / np.array(best)))
    found["share_of_peak" if case.flops else "share_of_copy"] = share
    if products:
        found["sgemm_ratio"] = float(np.median(np.array(times) / np.array(products)))
    return found


def _repeated(run):
    """A function that measures run, so often that it takes a while: seconds of one."""
    run()
    count = max(1, min(1000, round(ENOUGH / max(turns.seconds(run), 1e-9))))

    def several():
        for _ in range(count):
            run()

    return lambda: turns.seconds(several) / count


def _row(case, found):
    kinds = ("gflops", "share_of_peak") if case.flops else ("gbs", "share_of_copy")
    rate, share = (found[kind] for kind in kinds)
    part = "" if share is None else f"{share * 100:.0f} %"
    blanks, width = ("", 10) if case.flops else (" " * 19, 9)
    row = f"{case.layer:22}{case.name:16}{found['ms']:10.3f}"
    row += f"{blanks}{rate:{width}.1f}{part:>9}"
    return f"{row}  ratio to sgemm {found['sgemm_ratio']:.2f}" if "sgemm_ratio" in found else row


class Yardsticks:
    """The core's peak of products and of copied bytes, measured again beside each case."""

    def __init__(self, threads):
        self.threads, self.kernels = threads, builds.kernels()
        self.flops, self.copies = [], []
        self.factors = np.repeat(np.array([0.999, 0.001], np.float32), LANES)
        self.array = np.ones(16 << 20, np.float32)  # 64 MiB, and as much to copy it to
        self.target = np.ones_like(self.array)

    def products(self):
        """FLOP/s of a moment; None without kernels. Of all cores used, where there are several."""
        if self.kernels is None:
            return None
        self.factors[:LANES] = 0.999
        began = time.perf_counter()
        counted = self.kernels.fma_peak(1_000_000, self.factors) * self.threads
        self.flops.append(counted / (time.perf_counter() - began))
        return self.flops[-1]

    def copy(self):
        """Bytes a second of a moment, by one core: memory is shared."""
        began = time.perf_counter()
        if self.kernels is None:
            np.copyto(self.target, self.array)
        else:
            self.kernels.copy(self.array, self.target, self.array.size)
        self.copies.append(2 * self.array.nbytes / (time.perf_counter() - began))
        return self.copies[-1]

    def best(self):
        """(GFLOP/s, GB/s), medians; None where it was not measured."""
        return tuple(np.median(x) / 1e9 if x else None for x in (self.flops, self.copies))

    def __str__(self):
        flops, copy = self.best()
        peak = "not measured: no C kernels" if flops is None else f"{flops:.1f} GFLOP/s"
        moved = "not measured" if copy is None else f"{copy:.1f} GB/s read and written"
        return f"peak of added products: {peak}; copy of 64 MiB: {moved}"


def cases(network, chosen):
    """The Cases of a network's layers, of the standard shapes, or of the large layer ("dense")."""
    if network == "dense":
        yield from _large_dense(chosen.threads)
        return
    if network != "shapes":
        net = subject.network(network, chosen.image, chosen.seed)
        shapes = [net.input_shape, *net.output_shapes]
        for i, (layer, shape) in enumerate(zip(net.layers, shapes, strict=False)):
            yield from _cases(f"{network}/{layer.name}", layer, shape, chosen, first=i == 0)
        return
    for channels, side in SHAPES:
        layer = Conv2D(3, channels, padding=1, name="conv")
        name = f"{channels} at {side}x{side}"
        yield from _cases(name, layer, (channels, side, side), chosen)


def _cases(name, layer, shape, chosen, first=False):
    """The passes of one layer on random values; the first layer of a network wants no dx."""
    batch = share(chosen.batch_size, OneRank())
    numbers = np.random.default_rng(0)

    def random(*size):
        return numbers.standard_normal(size, np.float32)

    built = Network([layer], shape)
    (layer,) = built.layers
    x = random(batch.blocks, *shape, LANES)
    dy = random(batch.blocks, *built.output_shape, LANES)
    backend = backends.of(Blocked(x, batch))
    weights = {k.rpartition(".")[2]: v for k, v in built.parameters.items()}
    arguments = {k: v for k, v in layer.spec().items() if k != "name"}
    same = (shape, *map(str, arguments.items()))
    make = FAMILIES.get(type(layer).__name__)
    for case, run, flops, moved in make(backend, layer, x, dy, weights, batch) if make else ():
        if not (first and case == "dx"):
            yield Case(name, case, same, run, flops, moved)


def _conv(backend, layer, x, dy, weights, batch):
    weight, bias = weights["weight"], weights["bias"]
    how = (
        check.pair("", "stride", layer.stride, 1),
        check.pads("", layer.padding),
        check.pair("", "dilation", layer.dilation, 1),
        layer.groups,
    )
    counts, tree = batch.counts(), batch.tree
    flops = 2 * weight[0].size * dy.size

    def backward(*needs):
        return lambda: backend.conv2d_backward(dy, x, weight, *how, counts, tree, needs)

    yield "forward", lambda: backend.conv2d(x, weight, bias, *how), flops, 0
    yield "dx", backward(True, False, False), flops, 0
    yield "dweight", backward(False, True, False), flops, 0
    if not backend.fuses_convolutions:
        return

    def source(values):
        channels = values.shape[1]
        return DeferredInput(values, *(np.full(channels, v, np.float32) for v in (0.1, 1.1, 0.2)))

    below, above = source(x), source(dy.copy())
    factors = (np.ones(dy.shape[1], np.float32),) * 3
    # as the training step has them: normalization and ReLU in the same pass, sums for the next
    yield (
        "fused forward",
        lambda: backend.conv2d_moments(below, weight, bias, *how, counts, tree),
        flops,
        0,
    )
    yield (
        "fused backward",
        lambda: backend.conv2d_backward(
            dy, below, weight, *how, counts, tree, (True,) * 3, (above, *factors), True
        ),
        2 * flops,
        0,
    )


def _batchnorm(backend, layer, x, dy, weights, batch):
    counts, tree = batch.counts(), batch.tree
    vector = np.linspace(0.5, 1.5, x.shape[1])
    yield "statistics", lambda: backend.moments(x, counts, tree), 0, x.nbytes
    yield "forward", lambda: backend.batchnorm(x, vector, vector, vector), 0, 2 * x.nbytes
    yield "sums", lambda: backend.batchnorm_sums(dy, x, vector, tree), 0, 2 * x.nbytes
    yield (
        "dx",
        lambda: backend.batchnorm_dx(dy, x, vector, vector, vector, vector, counts),
        0,
        3 * x.nbytes,
    )


def _relu(backend, layer, x, dy, weights, batch):
    yield "forward", lambda: backend.relu(x), 0, 2 * x.nbytes
    yield "dx", lambda: backend.relu_dx(dy, x), 0, 3 * x.nbytes


def _windows(layer):
    stride = layer.size if layer.stride is None else layer.stride
    return (
        check.pair("", "size", layer.size, 1),
        check.pair("", "stride", stride, 1),
        check.pads("", layer.padding),
    )


def _max_pool(backend, layer, x, dy, weights, batch):
    how = _windows(layer)
    _, argmax = backend.max_pool2d(x, *how)
    moved = x.nbytes + dy.nbytes + argmax.nbytes
    yield "forward", lambda: backend.max_pool2d(x, *how), 0, moved
    yield "dx", lambda: backend.max_pool2d_dx(dy, argmax, x, *how, batch.tree), 0, moved


def _average_pool(backend, layer, x, dy, weights, batch):
    how = _windows(layer)
    moved = x.nbytes + dy.nbytes
    yield "forward", lambda: backend.average_pool2d(x, *how), 0, moved
    yield "dx", lambda: backend.average_pool2d_dx(dy, x, *how, batch.tree), 0, moved


def _dense(backend, layer, x, dy, weights, batch):
    x = x.reshape(len(x), -1, LANES)
    weight, bias = weights["weight"], weights["bias"]
    flops = 2 * weight.size * LANES * len(x)
    yield "forward", lambda: backend.dense(x, weight, bias), flops, 0
    yield "dx", lambda: backend.dense_dx(dy, weight), flops, 0
    yield "dweight", lambda: backend.dense_dweight(dy, x, batch.tree), flops, 0
    yield (
        "backward",
        lambda: backend.dense_backward(dy, x, weight, batch.tree, (True,) * 3),
        2 * flops,
        0,
    )


def _large_dense(threads):
    """The passes of the layer DENSE; beside each, on one thread, NumPy's product of all images."""
    features, outputs, images = DENSE
    batch = share(images, OneRank())
    numbers = np.random.default_rng(0)

    def random(*size):
        return numbers.standard_normal(size, np.float32)

    weight, x = random(outputs, features), random(batch.blocks, features, LANES)
    dy = random(batch.blocks, outputs, LANES)
    backend = backends.of(Blocked(x, batch))
    # an image a column, which no other layout beats in BLAS
    flat, dflat = (v.swapaxes(0, 1).reshape(v.shape[1], images) for v in (x, dy))
    products = {
        "forward": (weight, flat),
        "dx": (weight.T, dflat),
        "dweight": (dflat, flat.T),
    }

    def sgemm(a, b):
        y = np.empty((len(a), b.shape[1]), np.float32)
        return lambda: np.matmul(a, b, out=y)

    weights = {"weight": weight, "bias": np.zeros(outputs, np.float32)}
    for name, run, flops, moved in _dense(backend, None, x, dy, weights, batch):
        if name in products:
            beside = sgemm(*products[name]) if threads == 1 else None
            yield Case(f"{features} to {outputs}", name, DENSE, run, flops, moved, beside)


FAMILIES = {
    "Conv2D": _conv,
    "BatchNorm": _batchnorm,
    "ReLU": _relu,
    "MaxPool2D": _max_pool,
    "AveragePool2D": _average_pool,
    "Dense": _dense,
}
