"""`python -m benchmarks gpu`: compare mpidl's step with PyTorch's on one GPU; time the kernels.

mpidl's step and PyTorch's run in separate processes that take turns: one process works while the
other processes wait in a read. CUDA events around consecutive steps give the times. The tables show
medians over the rounds. Only steps of the same precision are compared: fp32 (mpidl's kernels
compute each product as three TF32 products) with PyTorch without TF32, and TF32 with TF32. The
tables also list PyTorch's times in bf16.
"""

import argparse
import sys
import tempfile
import time

from benchmarks import report as reports
from benchmarks import subject, torch_step, turns
from benchmarks.gpu import floors, tables
from mpidl.backends.gpu.discovery import visible
from mpidl.comm.launcher import environment
from mpidl.errors import Fault, UserError

OURS = ("fp32", "tf32")
VARIANTS = {  # PyTorch's variants by precision; COMPILED runs last, because it takes minutes
    "fp32": ("eager", "channels_last", "graph", "graph+channels_last"),
    "tf32": ("eager", "channels_last", "graph", "graph+channels_last"),
    "bf16": ("channels_last", "graph+channels_last"),
}
COMPILED = "compile+channels_last"
# Largest relative differences of the first loss that rounding can explain.
SAME_LOSS = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 2e-2}
TURN = 0.03  # duration of a turn in seconds
COMPILE_SECONDS = 45  # minimum time left for starting a compiled variant


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    gpus = visible()
    if not gpus.gpus:
        raise UserError(f"bench gpu requires a GPU that mpidl can use: {gpus.reason}")
    report = reports.Report("timing")
    measure(report, options.settings, options.rounds, options.limit, gpus.gpus[0].name)
    print(reports.markdown([report.record]))
    record = reports.header(options, {}) | {"gpu": gpus.gpus[0].name} | report.record
    if report.failed:
        reports.write_json(options.json, record)
        raise Fault(f"failed: {', '.join(report.failed)}")
    return record


def measure(report, settings, rounds, limit, gpu):
    """Time as many settings as the time limit allows, and fill the report.

    Parameters
    ----------
    report : Report
        Receives tables, facts and checks.
    settings : list of tuple
        Pairs (network, batch size).
    rounds : int
        Number of turns of each variant.
    limit : float
        Time limit in seconds.
    gpu : str
        Name of the GPU.
    """
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        sides = Sides(folder, deadline)
        try:
            take_turns(report, [Timing(*setting) for setting in settings], rounds, sides, gpu)
        finally:
            sides.close()
    report.finish()


def take_turns(report, results, rounds, sides, gpu):
    """Ask the Sides for all measurements, and store these in the Timings and the report."""
    rate = _rates(report, sides, gpu)
    for result in results:
        if sides.left() < 10:
            report.note(f"{result.name}: no time left")
            continue
        _time_uncompiled(report, result, rounds, sides)
        result.kernels = _ask(report, sides, "ours", "kernels", f"{result.name} fp32", rounds)
        _add_tables(report, results, rate)
        sides.drop()
    for precision in VARIANTS if sides.torch else ():
        for result in results:
            if sides.left() < COMPILE_SECONDS:
                report.note(f"{result.name}, {precision}: no time left for torch.compile")
            elif result.ms:
                _time_compiled(report, result, precision, rounds, sides)
                _add_tables(report, results, rate)
                sides.drop()
    for result in results:
        compare_losses(report, result)


class Timing:
    """Times and losses of the steps of one network and batch size.

    `ms` maps (side, variant, precision) to the milliseconds per step of each round. `losses` maps
    the same keys to the losses of the first steps.
    """

    def __init__(self, network, batch, image=None):
        self.network, self.batch, self.image = network, batch, image
        self.name = f"{network} {batch}"
        self.work = floors.work(subject.network(network, image))
        self.ms, self.losses, self.kernels = {}, {}, None

    def step_options(self, **options):
        """Return the keyword arguments of a step: network, batch, image and the given arguments."""
        return {"network": self.network, "batch": self.batch, "image": self.image, **options}


class Sides:
    """The processes that take turns. A process starts when it is first asked."""

    def __init__(self, folder, deadline):
        self.folder, self.deadline, self.alive, self.count = folder, deadline, {}, 0
        self.torch = torch_step.is_installed()

    def left(self):
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def ask(self, kind, *question):
        """Send a question to "ours" or "theirs" and return the answer. Raise Lost on failure.

        If the process has ended, the next question starts a new process, without steps.
        """
        if kind not in self.alive:
            self.count += 1
            command = [sys.executable, "-m", f"benchmarks.gpu.{kind}"]
            name, patience = f"{kind}-{self.count}", max(self.left(), 10)
            self.alive[kind] = turns.Side(name, [command], 1, environment(), self.folder, patience)
        try:
            return self.alive[kind].ask(*question)[0]
        except turns.Lost as lost:
            if lost.reason.startswith(("ended", "no answer")):  # the process is gone
                self.alive.pop(kind).close()
            raise

    def drop(self):
        """Tell the processes to free their steps."""
        for kind in list(self.alive):
            try:
                self.ask(kind, "drop")
            except turns.Lost:
                pass  # the process has ended, so its steps are gone

    def close(self):
        """End the processes."""
        for side in self.alive.values():
            for process in side.processes:
                process.terminate()  # it may be compiling
            side.close()


def _ask(report, sides, kind, *question):
    """Return the answer, or None after adding a note with the reason."""
    try:
        return sides.ask(kind, *question)
    except turns.Lost as lost:
        report.note(f"{question[0]} {question[1] if question[1:] else ''}: {lost.reason}")
        return None


def _rates(report, sides, gpu):
    """Return the Rates for the floors. Report these Rates and the measured rates as facts."""
    copy = _ask(report, sides, "ours", "copy_rate")
    products = _ask(report, sides, "theirs", "product_rates") if sides.torch else None
    if copy:
        report.fact("copy within the GPU, measured", f"{copy / 1e12:.2f} TB/s")
    if products:
        texts = [f"{kind} {rate / 1e12:.0f}" for kind, rate in products.items()]
        report.fact("products by PyTorch, measured, TFLOP/s", ", ".join(texts))
    measured = floors.Rates(copy, **products, source="measured") if copy and products else None
    rate = floors.rates(gpu, measured)
    if rate is not None:
        report.fact(
            "floors are computed with",
            f"{rate.copy / 1e12:.2f} TB/s; float32 {rate.fp32 / 1e12:.0f}, TF32 "
            f"{rate.tf32 / 1e12:.0f}, bf16 {rate.bf16 / 1e12:.0f} TFLOP/s ({rate.source})",
        )
    return rate


def _time_uncompiled(report, result, rounds, sides):
    """Time our step and all PyTorch variants that are not compiled."""
    prepared = {}
    for precision in OURS:
        _prepare(report, sides, prepared, result, "ours", "graphs", precision)
    _prepare(report, sides, prepared, result, "ours", "no graphs", OURS[0])
    if sides.torch:
        for precision, variants in VARIANTS.items():
            for variant in variants:
                _prepare(report, sides, prepared, result, "theirs", variant, precision)
    _time(report, sides, prepared, result, rounds)


def _time_compiled(report, result, precision, rounds, sides):
    """Time the compiled PyTorch variant in turns with our step."""
    prepared = {}
    if not _prepare(report, sides, prepared, result, "theirs", COMPILED, precision):
        return
    if precision in OURS:
        _prepare(report, sides, prepared, result, "ours", "graphs", precision)
    _time(report, sides, prepared, result, rounds)


def _prepare(report, sides, prepared, result, kind, variant, precision):
    """Let a side build a step; add it to `prepared`, {name: key}. Return whether this worked."""
    if kind == "ours":
        options = result.step_options(precision=precision, graphs=variant == "graphs")
        name = f"{result.name} {precision}" + ("" if options["graphs"] else " no graphs")
    else:
        options = result.step_options(precision=precision, variant=variant)
        name = f"{result.name} {variant} {precision}"
    losses = _ask(report, sides, kind, "prepare", name, options)
    if losses is None:
        return False
    key = kind, variant, precision
    result.losses.setdefault(key, losses)
    prepared[name] = key
    return True


def _time(report, sides, prepared, result, rounds):
    """Time all prepared steps in turns. The first round sets the number of steps per turn."""
    counts, times = {}, {name: [] for name in prepared}
    for number, name in turns.alternate(prepared, rounds + 1):
        if name not in times or sides.left() < 1:
            continue
        ms = _ask(report, sides, prepared[name][0], "run", name, counts.get(name, 3))
        if ms is None:
            del times[name]
        elif number == 0:
            counts[name] = turns.steps_for(ms / 1e3, TURN, 400)
        else:
            times[name].append(ms)
    for name, values in times.items():
        if values:
            result.ms.setdefault(prepared[name], []).extend(values)


def compare_losses(report, result):
    """Check that the first loss of each variant agrees with ours."""
    ours = result.losses.get(("ours", "graphs", "fp32"))
    for (kind, variant, precision), losses in result.losses.items() if ours else ():
        difference = abs(losses[0] / ours[0] - 1)
        if not difference <= SAME_LOSS[precision]:
            report.check(
                f"{result.name}: first loss of {kind} {variant} {precision}",
                False,
                f"{losses[0]:.8f}, ours {ours[0]:.8f}",
            )


def _add_tables(report, results, rate):
    timed = [result for result in results if result.ms]
    report.table(*tables.steps(timed, rate))
    report.table(*tables.variants(timed))
    for result in timed:
        if result.kernels:
            report.table(*tables.kernels(result))
