"""`python -m benchmarks roofline`: compare passes of a training step with their floors.

The floor of a pass is a lower bound on its time: the larger of two times. The first is the time of
the products at the measured peak of the core's multiply-adds, counted after Winograd's transforms.
The second is the time of reading or writing each array once, at the measured speed of updates in
place. `kernels` and this command time single passes in the same way. This command also times the
replayed step of `dl.train` as a whole. Work that the step fuses into a convolution, such as batch
normalization, does not increase the floor of the step.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import floors, kernels, machine, mpidl_step, passes, report, subject, turns
from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.nn import BatchNorm, Conv2D, Dense, MaxPool2D, Network
from mpidl.nn.fusion import find_runs
from mpidl.ranks.world import World
from mpidl.report import svg_charts
from mpidl.report.elements import element, page, table
from mpidl.report.page.run_page import STYLE
from mpidl.training.options import configuration

HEAD = ("layer", "pass", "in a step", "ms", "floor, ms", "products", "bytes", "floor / time")
SUM_HEAD = ("passes of a step", "ms", "floor, ms", "floor / time")
ELEMENTWISE = "ReLU, addition, other normalizations"
# {kind of layer: its group in the sums}; convolutions have two groups
GROUPS = {
    "BatchNorm": "batch normalization",
    "MaxPool2D": "pooling",
    "AveragePool2D": "pooling",
    "GlobalAveragePool2D": "pooling",
    "Dense": "dense",
}
OPTIMIZER = "optimizer"
SGDM_ARRAYS = 5  # reads weight, velocity and gradient; writes weight and velocity


class Row(NamedTuple):
    """A measured pass.

    Attributes
    ----------
    number : int
        Number of the layer in the network, from 1. The optimizer follows the last layer.
    layer, name : str
        Names of the layer and of the pass.
    group : str
        Group of the pass in the sums.
    count : int
        Number of layers of this shape that run this pass in a training step.
    seconds : float
        Time of the single pass.
    floor : Floor
        Shortest possible time.
    """

    number: int
    layer: str
    name: str
    group: str
    count: int
    seconds: float
    floor: floors.Floor

    @property
    def share(self) -> float:
        """The shortest possible time divided by the measured time."""
        return self.floor.seconds / self.seconds


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    machine.refuse_launcher("roofline")
    notes = subject.configure(options)
    yardsticks = kernels.Yardsticks(options.threads)
    if yardsticks.kernels is None:
        raise UserError("roofline: expected mpidl's C kernels, found none (kernels/README.md)")
    text = f"{machine.arithmetic()}, medians of {options.rounds} rounds"
    names = ("settings", "threads", "winograd")
    record = report.header(options, configuration.versions_of("none"), *names)
    networks, sections, bandwidths = {}, [], []
    for network, batch_size in options.settings:
        options.network, options.batch_size = network, batch_size
        subject.print_head(options, text, notes)
        rows, step_seconds, bandwidth = measure(options, yardsticks)
        bandwidths.append(bandwidth / 1e9)
        sums = sums_of(rows, step_seconds)
        report.print_table([HEAD, *map(cells, rows)], left=2)
        report.print_table([SUM_HEAD, *sums])
        title = f"{network}, batch {batch_size}"
        sections += page_sections(title, rows, sums)
        networks[title] = {
            "passes": [row._asdict() | {"floor": row.floor._asdict()} for row in rows],
            "step_seconds": step_seconds,
        }
    figures = {
        "peak_gflops": yardsticks.medians()[0],
        "bandwidth_gbs": report.median(bandwidths),
    }
    peaks = f"peak of multiply-adds: {figures['peak_gflops']:.1f} GFLOP/s; update of 64 MiB in "
    peaks += f"place: {figures['bandwidth_gbs']:.1f} GB/s read and written"
    print(f"(layers of the same shape are measured once)\n{peaks}")
    if options.page:
        write_whole(options.page, render(record, peaks, sections))
    return record | figures | {"networks": networks}


def measure(
    options: argparse.Namespace, yardsticks: kernels.Yardsticks
) -> tuple[list[Row], float, float]:
    """Measure the passes of a network.

    Returns
    -------
    list of Row
        The passes.
    float
        Median seconds of a training step.
    float
        Bandwidth of the memory in bytes/s.
    """
    net = subject.network(options.network, options.image, options.seed, dropout=False)
    in_step = step_passes(net)
    timed: dict[tuple, tuple] = {}  # {(pass, shape): (number, group, case, seconds)}
    counts: dict[tuple, int] = {}
    for number, layer in enumerate(net.layers, 1):
        shape = passes.layer_shape(net, layer, options.batch_size)
        if not any(key[1] == shape for key in timed):
            for case in passes.layer_cases(net, layer, layer.name, options.batch_size):
                seconds = kernels.measure(case, yardsticks, options.rounds)["ms"] / 1e3
                group = group_of(layer, case.name)
                timed[case.name, shape] = number, group, case._replace(run=None), seconds
        for name in in_step[layer.name]:
            counts[name, shape] = counts.get((name, shape), 0) + 1
    step, step_seconds = _timed_step(net, options, yardsticks.clock)
    moved = SGDM_ARRAYS * sum(weight.nbytes for weight in net.parameters.values())
    update = passes.Case(OPTIMIZER, "update", (), step.step.largest.update, 0, moved)
    seconds = kernels.measure(update, yardsticks, options.rounds)["ms"] / 1e3
    timed["update", ()] = len(net.layers) + 1, OPTIMIZER, update, seconds
    counts["update", ()] = 1
    peak, bandwidth = yardsticks.medians()[0] * 1e9, yardsticks.bandwidth(4 * options.rounds)
    rows = []
    for key, (number, group, case, seconds) in timed.items():
        if case.name.startswith("fused") and key not in counts:
            continue
        floor = floors.floor(case.products, case.bytes, peak, bandwidth)
        row = number, case.layer, case.name, group, counts.get(key, 0), seconds, floor
        rows.append(Row(*row))
    return rows, step_seconds, bandwidth


def _timed_step(net, options, clock):
    """Return the recorded step of a network, and its median seconds over the rounds."""
    arrays = subject.mini_batch(net.input_shape, options.batch_size, options.seed)
    step = mpidl_step.TrainStep(net, arrays, World(timeout=options.timeout))
    for _ in range(3):
        step()  # the first two steps are recorded and checked
    count = turns.steps_for(turns.seconds(step))
    times = [turns.timed_steps(step, count, clock=clock) for _ in range(options.rounds)]
    return step, report.median([sum(seconds) / count for seconds in times])


def step_passes(net: Network) -> dict[str, set[str]]:
    """Return {layer: names of the passes that a training step runs for it}."""
    names: dict[str, set[str]] = {layer.name: set() for layer in net.layers}
    for run in find_runs(net.layers, net.reads):
        layers = [net.layers[i] for i in run]
        first = layers[0]
        if isinstance(first, Conv2D):
            is_fused = any(isinstance(layer, BatchNorm) for layer in layers)
            is_fused = is_fused and not passes.reads_images(net, first)
            apart = {"forward", "dx", "dweight"}
            names[first.name] = {"fused forward", "fused backward"} if is_fused else apart
            if isinstance(layers[-1], MaxPool2D):
                names[layers[-1].name] = {"fused forward", "fused dx"}
        elif isinstance(first, Dense):
            names[first.name] = {"forward", "backward"}
        elif isinstance(first, BatchNorm):
            names[first.name] = {"statistics", "forward", "sums", "dx"}
        else:
            names[first.name] = {"forward", "dx"}
    return names


def group_of(layer: Any, name: str) -> str:
    """Return the group of a layer's pass."""
    if isinstance(layer, Conv2D):
        return f"convolution, {'forward' if 'forward' in name else 'backward'}"
    return GROUPS.get(type(layer).__name__, ELEMENTWISE)


def cells(row: Row) -> list[str]:
    """Return the cells of a row under HEAD."""
    times = (row.seconds, row.floor.seconds, row.floor.products, row.floor.bytes)
    texts = (report.milliseconds(seconds * 1e3) if seconds else "" for seconds in times)
    count = f"{row.count}x" if row.count else ""
    return [row.layer, row.name, count, *texts, f"{row.share:.0%}"]


def sums_of(rows: Sequence[Row], step_seconds: float) -> list[list[str]]:
    """Return the rows under SUM_HEAD: one per group, their sum, and the training step."""
    groups = dict.fromkeys(row.group for row in rows if row.count)
    sums = {}
    for group in groups:
        members = [row for row in rows if row.group == group]
        sums[group] = (
            sum(row.count * row.seconds for row in members),
            sum(row.count * row.floor.seconds for row in members),
        )
    seconds, floor = map(sum, zip(*sums.values(), strict=True))
    sums |= {"sum": (seconds, floor), "training step": (step_seconds, floor)}
    return [
        [name, *(report.milliseconds(value * 1e3) for value in pair), f"{pair[1] / pair[0]:.0%}"]
        for name, pair in sums.items()
    ]


# the page


def render(record: dict, peaks: str, sections: Sequence[Any]) -> bytes:
    """Return the page as HTML."""
    title = "Time of each pass against its floor"
    machine_text = f"{record['cpu']}, {record['arithmetic']}, {record['threads']} thread(s)"
    texts = (
        f"{machine_text}; {peaks}. Measured by python -m benchmarks roofline. On one thread, "
        "times are processor time.",
        "The floor of a pass is a lower bound on its time: the larger of two times. The first is "
        "the time of the products at the peak, counted after Winograd's transforms. The second is "
        "the time of reading or writing each array once at the speed of the update. Passes on "
        "arrays that fit into a cache can be faster than the floor. Passes are timed one by one. "
        'The column "in a step" counts the layers of this shape for which the step runs the pass '
        "in this form.",
    )
    paragraphs = (element("p", text) for text in texts)
    return page(title, STYLE, element("h1", title), *paragraphs, *sections)


def page_sections(title: str, rows: Sequence[Row], sums: Sequence[Sequence[str]]) -> list:
    """Return the heading, the chart and the tables of a network."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        is_convolution = row.group.startswith("convolution")
        if not row.name.startswith("fused"):
            name = f"convolution, {row.name}" if is_convolution else row.group
            series.setdefault(name, []).append((row.number, 100 * row.share))
    lines = [
        svg_charts.Line(name, points, colour, "points")
        for (name, points), colour in zip(series.items(), svg_charts.COLOURS, strict=False)
    ]
    last = max(row.number for row in rows)
    lines.append(svg_charts.Line("", [(0, 100.0), (last, 100.0)], "#8a8f98", "faint"))
    numbered = [[f"{row.number} {row.layer}", *cells(row)[1:]] for row in rows]
    chart = svg_charts.chart("Floor / time", lines, unit=" %", x_label="layer")
    return [
        element("h2", title),
        chart,
        table(SUM_HEAD, sums),
        table(HEAD, numbered),
    ]
