"""`python -m mpidl.bench kernels`: each layer and pass against what the core can do at most.

GFLOP/s are effective: the operations of the direct algorithm, two a product, over the time taken,
so that Winograd's may lie above the peak. What moves memory and computes little is given in GB/s,
each array it must read or write counted once, against the speed of a copy.
"""

import time
from typing import NamedTuple

import numpy as np

from mpidl import backends
from mpidl.backends import native
from mpidl.blocks import LANES, Blocked, OneRank, Source, share
from mpidl.cli.bench import machine, subject, turns
from mpidl.errors import UserError
from mpidl.nn import Conv2D, Network
from mpidl.ops import check
from mpidl.training import options

# 3x3 convolutions to compare machines and versions by: (channels, height and width).
SHAPES = ((20, 24), (32, 32), (64, 16), (128, 8))
ENOUGH = 0.02  # seconds of a measurement


class Case(NamedTuple):
    """One pass of one layer."""

    layer: str
    name: str  # of the pass
    same: tuple  # what cases of the same layer and shape have in common
    run: object
    flops: int  # 0 where it is bytes that count
    bytes: int


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
    tables: dict = {name: {} for name in ("ms", "gflops", "gbs")}
    print(
        f"{'layer':26}{'pass':12}{'ms':>10}{'GFLOP/s':>10}{'of peak':>9}{'GB/s':>9}{'of copy':>9}"
    )
    seen = {}
    for network in chosen.networks:
        for case in cases(network, chosen):
            yardsticks.measure()
            same = (case.name, *case.same)
            seconds = seen[same] = seen.get(same) or measure(case.run, chosen.rounds)
            print(_row(case, seconds, yardsticks), flush=True)
            rates = {"ms": seconds * 1e3}
            rates["gflops"] = case.flops / seconds / 1e9 if case.flops else None
            rates["gbs"] = case.bytes / seconds / 1e9 if case.bytes else None
            for name, rate in rates.items():
                if rate is not None:
                    tables[name].setdefault(case.layer, {})[case.name] = rate
    print(yardsticks)
    machine.write_json(chosen.json, _result(chosen, tables, yardsticks))
    return 0


def _row(case, seconds, yardsticks):
    row = f"{case.layer:26}{case.name:12}{seconds * 1e3:10.3f}"
    peak, copy = yardsticks.best()
    amount, best, blanks = (case.flops, peak, "") if case.flops else (case.bytes, copy, " " * 19)
    rate = amount / seconds / 1e9
    part = "" if best is None else f"{rate / best * 100:.0f} %"
    return f"{row}{blanks}{rate:{10 if case.flops else 9}.1f}{part:>9}"


def _result(chosen, tables, yardsticks):
    def shares(table, best):
        return {
            layer: {name: rate / best if best else None for name, rate in passes.items()}
            for layer, passes in table.items()
        }

    peak, copy = yardsticks.best()
    return machine.facts(options.versions_of("none")) | {
        "networks": chosen.networks,
        "batch_size": chosen.batch_size,
        "threads": chosen.threads,
        "winograd": chosen.winograd,
        "peak_gflops": peak,
        "copy_gbs": copy,
        **tables,
        "share_of_peak": shares(tables["gflops"], peak),
        "share_of_copy": shares(tables["gbs"], copy),
    }


class Yardsticks:
    """The core's peak of products and of copied bytes, measured again beside each case."""

    def __init__(self, threads):
        self.threads, self.library = threads, native.library()
        self.flops, self.copies = [], []
        self.factors = np.repeat(np.array([0.999, 0.001], np.float32), LANES)
        self.array = np.ones(16 << 20, np.float32)  # 64 MiB, and as much to copy it to
        self.target = np.ones_like(self.array)

    def measure(self):
        """Take a measure of each, on one core."""
        if self.library is None:
            copied = turns.seconds(lambda: np.copyto(self.target, self.array))
        else:
            self.factors[:LANES] = 0.999
            began = time.perf_counter()
            counted = self.library.fma_peak(1_000_000, self.factors)
            self.flops.append(counted / (time.perf_counter() - began))
            copied = turns.seconds(
                lambda: self.library.copy(self.array, self.target, self.array.size)
            )
        self.copies.append(2 * self.array.nbytes / copied)

    def best(self):
        """(GFLOP/s, GB/s) of all cores used, medians so far; None for the first without kernels.

        More threads multiply the products; memory they share.
        """
        flops = np.median(self.flops) * self.threads / 1e9 if self.flops else None
        return flops, np.median(self.copies) / 1e9

    def __str__(self):
        flops, copy = self.best()
        peak = "not measured: no C kernels" if flops is None else f"{flops:.1f} GFLOP/s"
        return f"peak of added products: {peak}; copy of 64 MiB: {copy:.1f} GB/s read and written"


def measure(run, rounds):
    """Median seconds of a call."""
    run()
    count = max(1, min(1000, round(ENOUGH / max(turns.seconds(run), 1e-9))))

    def several():
        for _ in range(count):
            run()

    return machine.median([turns.seconds(several) / count for _ in range(rounds)])


def cases(network, chosen):
    """The Cases of a network's layers, or of the standard shapes ("shapes")."""
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
    if not hasattr(backend, "conv2d_moments"):
        return

    def source(values):
        channels = values.shape[1]
        return Source(values, *(np.full(channels, v, np.float32) for v in (0.1, 1.1, 0.2)))

    below, above = source(x), source(dy.copy())
    factors = (np.ones(dy.shape[1], np.float32),) * 3
    # as the training step has them: normalization and ReLU in the same pass, sums for the next
    yield (
        "in step",
        lambda: backend.conv2d_moments(below, weight, bias, *how, counts, tree),
        flops,
        0,
    )
    yield (
        "in backward",
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


FAMILIES = {
    "Conv2D": _conv,
    "BatchNorm": _batchnorm,
    "ReLU": _relu,
    "MaxPool2D": _max_pool,
    "AveragePool2D": _average_pool,
    "Dense": _dense,
}
