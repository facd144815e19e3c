"""`python -m benchmarks gpu`: compare mpidl's step with PyTorch's on one GPU; time the kernels.

With `--count` or `--sass`, the command counts instead, without a GPU (see `counts` and `sass`).

mpidl's step and PyTorch's run in separate processes, on the same GPU: one process works while the
other waits in a read. Each variant is built, timed and freed before the next, so that a network may
fill the memory. CUDA events around consecutive steps give the times. The tables show medians over
the rounds. Only steps of the same precision are compared: fp32 (mpidl's kernels
compute each product as three TF32 products) with PyTorch without TF32, TF32 with TF32, and bf16
with PyTorch's autocast.
"""

import argparse
import os
import sys
import tempfile
import time

from benchmarks import report as reports
from benchmarks import subject, torch_step, turns
from benchmarks.gpu import counts, floors, sass, tables
from mpidl.backends.discovery import visible
from mpidl.errors import Fault, UserError
from mpidl.launcher import environment

FIRST = "ours", "graphs", "fp32"  # timed first, and once more after all other variants
# (side, variant, precision) in the order of timing: all steps are timed in a group before the next
# group. Compiled variants are last, because they take minutes.
COMPILED = "compile+channels_last"
PRECISIONS = "fp32", "tf32", "bf16"
OF_KERNELS = "fp32", "bf16"  # precisions of the tables of kernels
GROUPS = (
    (FIRST,),
    (
        *(("ours", "graphs", precision) for precision in PRECISIONS[1:]),
        *(("theirs", "graph+channels_last", precision) for precision in PRECISIONS),
    ),
    (
        ("ours", "no graphs", "fp32"),
        *(("theirs", "eager", precision) for precision in PRECISIONS),
        *(("theirs", "channels_last", precision) for precision in PRECISIONS),
        *(("theirs", "graph", precision) for precision in PRECISIONS),
        FIRST,
    ),
    tuple(("theirs", COMPILED, precision) for precision in PRECISIONS),
)
# Largest relative differences of the first loss that rounding can explain.
SAME_LOSS = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 2e-2}
TURN = 0.03  # duration of a turn in seconds
COMPILE_SECONDS = 45  # minimum time left for starting a compiled variant


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    if options.count:
        return counts.main(options)
    if options.sass:
        return sass.main()
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


def measure(report, settings, rounds, limit, gpu, torch_device="cuda"):
    """Time as many settings as the time limit allows, and fill the report.

    Parameters
    ----------
    report : Report
        Receives tables, facts and checks.
    settings : list of tuple
        Pairs (network, batch size), or triples that end in the image shape.
    rounds : int
        Number of turns of each variant.
    limit : float
        Time limit in seconds.
    gpu : str
        Name of the GPU.
    torch_device : str
        PyTorch's device. "cpu" tries the benchmark, and its times mean nothing.
    """
    deadline = time.monotonic() + limit
    if torch_device == "cpu":
        report.note("PyTorch computes on the CPU: its times are no times of a GPU")
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        sides = Sides(folder, deadline, torch_device)
        if not sides.torch:
            report.note("PyTorch's side is skipped: it is not installed")
        try:
            take_turns(report, [Timing(*setting) for setting in settings], rounds, sides, gpu)
        finally:
            sides.close()
    report.finish()


def take_turns(report, results, rounds, sides, gpu):
    """Ask the Sides for all measurements, and store these in the Timings and the report.

    Only one step is in the GPU's memory at a time.
    """
    rate = _rates(report, sides, gpu)
    for group in GROUPS:
        is_slow = any(variant == COMPILED for _, variant, _ in group)
        for result in results:
            for key in group if sides.torch else [key for key in group if key[0] == "ours"]:
                if sides.left() < (COMPILE_SECONDS if is_slow else 5):
                    report.note(f"{result.name}, {' '.join(key)}: no time left")
                    continue
                _time(report, sides, result, key, rounds)
                sides.drop()
                _add_tables(report, results, rate)
    for result in results:
        compare_losses(report, result)


class Timing:
    """Times and losses of the steps of one network and batch size.

    `ms` maps (side, variant, precision) to the milliseconds per step of each round. `losses` maps
    the same keys to the losses of the first steps, and `kernels` maps a precision to the rows of
    our kernels.
    """

    def __init__(self, network, batch, image=None):
        self.network, self.batch, self.image = network, batch, image
        self.name = f"{os.path.basename(network).rpartition(':')[2]} {batch}"
        self.work = floors.work(subject.network(network, image))
        self.ms, self.losses, self.kernels = {}, {}, {}


class Sides:
    """The processes that take turns. A process starts when it is first asked."""

    def __init__(self, folder, deadline, torch_device="cuda"):
        self.folder, self.deadline, self.alive, self.count = folder, deadline, {}, 0
        self.torch, self.torch_device = torch_step.is_installed(), torch_device
        self.environment = environment()
        # Both sides use the first visible GPU, whatever else is visible.
        first = self.environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self.environment["CUDA_VISIBLE_DEVICES"] = first

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
            command += [self.torch_device] if kind == "theirs" else []
            name, patience = f"{kind}-{self.count}", max(self.left(), 10)
            self.alive[kind] = turns.Side(
                name, [command], 1, self.environment, self.folder, patience
            )
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
    products = _ask(report, sides, "theirs", "rates") if sides.torch else None
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


def _time(report, sides, result, key, rounds):
    """Let a side build a step, and time it in turns. The first turn sets the number of steps."""
    kind, variant, precision = key
    options = {"network": result.network, "batch": result.batch, "image": result.image}
    options |= {"precision": precision}
    options |= {"graphs": variant == "graphs"} if kind == "ours" else {"variant": variant}
    name = f"{result.name} {variant} {precision}"
    losses = _ask(report, sides, kind, "prepare", name, options)
    if losses is None:
        return
    result.losses.setdefault(key, losses)
    count, times = 3, []
    for number in range(rounds + 1):
        ms = _ask(report, sides, kind, "run", name, count) if sides.left() > 1 else None
        if ms is None:
            break
        if number == 0:
            count = turns.steps_for(ms / 1e3, TURN, 400)
        else:
            times.append(ms)
    if times:
        result.ms.setdefault(key, []).extend(times)
    is_new = key[:2] == FIRST[:2] and precision not in result.kernels
    if is_new and precision in OF_KERNELS and sides.left() > 1:
        rows = _ask(report, sides, "ours", "kernels", name, rounds)
        result.kernels |= {precision: rows} if rows else {}


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
        for precision in result.kernels:
            report.table(*tables.kernels(result, precision))
