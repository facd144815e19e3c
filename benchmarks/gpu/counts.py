"""`python -m benchmarks gpu --count NETWORK:BATCH ...`: count the work of a step, without a GPU.

The training step is recorded on a device that gives out addresses and computes nothing. The
recorded launches show how many bytes and products each kernel moves and computes (`launches` has
the rules), and NVRTC's log shows its registers. The forecast of a launch is the larger of the time
of its bytes and the time of its products at the rates of `floors`, plus the time between kernels.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import floors as cpu_floors
from benchmarks import report
from benchmarks.gpu import compiling, floors, launches, messages, resources
from benchmarks.mpidl_step import RecordedStep
from mpidl import backends
from mpidl.backends import settings
from mpidl.backends.gpu import kernels, launching, nvrtc
from mpidl.backends.gpu.sums import Counts
from mpidl.files import write_whole
from mpidl.ranks.world import World
from mpidl.report import svg_charts
from mpidl.report.elements import element, page, table
from mpidl.report.page.run_page import STYLE
from mpidl.training.options import configuration

HEAD = ("kernel", "launches", "read, MB", "written, MB", "products issued, G", "useful, G")
HEAD += ("issued / useful", "registers", "occupancy", "forecast, ms")
BOUNDS = "bytes", "products", "launch"  # what a launch's time depends on


class Work(NamedTuple):
    """The counts of a launch. `floor` is the forecast without the time between kernels."""

    launch: kernels.Launch
    bytes_read: int
    bytes_written: int
    products_issued: int
    products_useful: int
    floor: cpu_floors.Floor

    @property
    def seconds(self) -> float:
        """The forecast."""
        return self.floor.seconds + floors.LAUNCH

    @property
    def bound(self) -> str:
        """The item of BOUNDS that takes the longest."""
        times = self.floor.bytes, self.floor.products, floors.LAUNCH
        return BOUNDS[times.index(max(times))]


def main(options: argparse.Namespace) -> dict:
    """Count the steps and return the results for the JSON file."""
    rate = floors.GPU_RATES[options.gpu]
    names = "count", "precision", "gpu", "ranks"
    record = report.header(options, configuration.versions_of("none"), *names)
    record["rates"] = rate._asdict() | {"launch": floors.LAUNCH, "mma": floors.MMA}
    print(rates_in_words(options.gpu, rate))
    figures, sections = {}, []
    for network, batch in options.count:
        name = f"{network}:{batch}"
        steps = [step(network, batch, options, rate, rank) for rank in range(options.ranks)]
        works = [work_of(launch, rate) for launch in steps[0].launches]
        figures[name] = summary(works, rows_of(works, rate.architecture))
        cells = [
            *map(cells_of, figures[name]["kernels"]),
            cells_of({"name": "sum"} | figures[name]),
        ]
        print(f"\n{name}, {options.precision}")
        report.print_table([HEAD, *cells])
        if options.ranks > 1:
            sent = [recorded.sent for recorded in steps]
            entry = messages.summary(sent, steps[0].gradient_bytes)
            figures[name]["messages"] = entry
            print(messages.in_words(entry))
        title = f"{network}, batch {batch}, {options.precision}"
        sections += [element("h2", title), chart(works), table(HEAD, cells)]
        if options.ranks > 1:
            sections.append(element("p", messages.in_words(entry)))
    if options.page:
        write_whole(options.page, render(rates_in_words(options.gpu, rate), sections))
    return record | {"counts": figures}


class Step(NamedTuple):
    """The launches of a rank's step, what the rank sends, and the size of all gradients."""

    launches: Sequence[kernels.Launch]
    sent: messages.Sent | None
    gradient_bytes: int


def step(
    network: str, batch: int, options: argparse.Namespace, rate: floors.Rates, rank: int = 0
) -> Step:
    """Record the training step of a rank."""
    world: Any = World(threads=None)
    if options.ranks > 1:
        world = messages.simulated_world(rank, options.ranks)
    before = settings.precision
    addresses = compiling.Addresses(rate.architecture, rate.processors)
    try:
        world.device, world.counts = launching.open(compiling.Collector(addresses)), Counts()
        recorded = RecordedStep(world, network, batch, options.precision, False, options.image)
        sent = None if world.size == 1 else messages.sent_by(recorded.program, world)
        nbytes = sum(weight.nbytes for weight in recorded.net.trainable.values())
        return Step(recorded.program.launches(), sent, nbytes)
    finally:
        launching.open(None)
        backends.configure(precision=before)


def work_of(launch: kernels.Launch, rate: floors.Rates) -> Work:
    """Return the counts of a launch."""
    read, written = launches.bytes_of(launch)
    issued, unit = launches.issued(launch), launches.unit_of_products(launch)
    floor = floors.of_launch(read + written, issued, unit, rate)
    return Work(launch, read, written, issued, launches.useful(launch), floor)


def rows_of(works: Iterable[Work], architecture: str) -> list[dict[str, Any]]:
    """Return a row per kernel, sorted by the forecast, for the JSON file.

    If NVRTC is installed, "registers" is the largest number of registers per thread of the
    launches, and "occupancy" the smallest fraction of resident threads. Otherwise, both are None.
    """
    groups: dict[str, list[Work]] = {}
    for work in works:
        groups.setdefault(launches.kernel_name(work.launch), []).append(work)
    use = _resources(works, architecture) if nvrtc.installed() else {}
    rows = []
    for name, members in groups.items():
        entries = [_use(work.launch, use, architecture) for work in members] if use else []
        rows.append(
            {"name": name}
            | _sums(members)
            | {
                "registers": max((registers for registers, _ in entries), default=None),
                "occupancy": min((share for _, share in entries), default=None),
            }
        )
    return sorted(rows, key=lambda row: -row["forecast_ms"])


def _resources(works, architecture):
    """Return {unit: {kernel: its resources}}, as in `resources.parse_log`."""
    units = dict.fromkeys(work.launch.unit for work in works)
    compiled = resources.compile_all(list(units), architecture)
    for value in compiled.values():
        if isinstance(value, Exception):
            raise value
    return compiled


def _use(launch, use, architecture):
    entry, threads = use[launch.unit][launch.name], launch.block[0]
    return entry["registers"], resources.occupancy(entry, threads, launch.shared, architecture)


def _sums(works):
    return {
        "launches": len(works),
        "bytes_read": sum(work.bytes_read for work in works),
        "bytes_written": sum(work.bytes_written for work in works),
        "products_issued": sum(work.products_issued for work in works),
        "products_useful": sum(work.products_useful for work in works),
        "forecast_ms": 1e3 * sum(work.seconds for work in works),
    }


def summary(works: Sequence[Work], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of a step in the JSON file: the sums, "bytes" and "kernels", the rows."""
    sums = _sums(works)
    nbytes = sums["bytes_read"] + sums["bytes_written"]
    return sums | {"bytes": nbytes, "kernels": rows}


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row under HEAD."""
    issued, useful = row["products_issued"], row["products_useful"]
    share = row.get("occupancy")
    return [
        row["name"],
        str(row["launches"]),
        *(f"{row[key] / 1e6:.2f}" for key in ("bytes_read", "bytes_written")),
        *(f"{count / 1e9:.3f}" if issued else "" for count in (issued, useful)),
        f"{issued / useful:.3f}" if useful else "",
        str(row.get("registers") or ""),
        "" if share is None else f"{share:.0%}",
        report.milliseconds(row["forecast_ms"]),
    ]


# the page


def rates_in_words(name: str, rate: floors.Rates) -> str:
    """Return a sentence with the rates of the forecast."""
    return (
        f"Forecast for {name}: {rate.copy / 1e12:.2f} TB/s; float32 {rate.fp32 / 1e12:.0f}, TF32 "
        f"{rate.tf32 / 1e12:.0f}, bf16 {rate.bf16 / 1e12:.0f} TFLOP/s ({rate.source}), of which "
        f"mma.sync reaches {floors.MMA[rate.architecture]:.0%}; {floors.LAUNCH * 1e6:.0f} µs "
        "between two kernels."
    )


def chart(works: Sequence[Work]) -> Any:
    """Return a chart of the forecast of each launch, in the order of the step."""
    lines = [svg_charts.Line(*line, "points") for line in _series(works)]
    return svg_charts.chart(
        "Forecast of each launch", lines, log=True, unit=" µs", x_label="launch"
    )


def _series(works: Sequence[Work]) -> Iterator[tuple[str, list[tuple[float, float]], str]]:
    for bound, colour in zip(BOUNDS, svg_charts.COLOURS, strict=False):
        points = [
            (float(i), 1e6 * work.seconds) for i, work in enumerate(works, 1) if work.bound == bound
        ]
        yield f"time of {'the launch' if bound == 'launch' else bound}", points, colour


def render(rates: str, sections: Sequence[Any]) -> bytes:
    """Return the page as HTML."""
    title = "Work of a training step on a GPU, counted"
    texts = (
        f"Counted by python -m benchmarks gpu --count, without a GPU. {rates}",
        "Each array is read or written once by a kernel, and the cache provides repeated reads. "
        "Products are multiply-adds: issued over the tiles of a kernel with their padding, and "
        "useful for the layer. The forecast of a launch is the larger of the time of its bytes "
        "and the time of its products, plus the time between two kernels. Registers are the "
        "largest number per thread, and occupancy the smallest fraction of resident threads.",
    )
    paragraphs = (element("p", text) for text in texts)
    return page(title, STYLE, element("h1", title), *paragraphs, *sections)
