"""`python -m benchmarks gpu`: our step against PyTorch's on one GPU, and our kernels by time.

Ours and PyTorch's run in processes of their own, which take turns: one works while the others
wait in a read. Times are of CUDA events around some steps that follow each other, medians over the
rounds. What is compared is of one precision: fp32 (ours by three TF32 products for each) against
PyTorch without TF32, TF32 against TF32; PyTorch's bf16 stands beside them.
"""

import importlib.util
import sys
import tempfile
import time

from benchmarks import machine, subject, turns
from benchmarks.gpu import floors, tables
from benchmarks.gpu.report import Report, markdown
from mpidl.backends.gpu.discovery import visible
from mpidl.cli import verify
from mpidl.errors import Fault, UserError

OURS = ("fp32", "tf32")
PLAIN = {  # of PyTorch, by precision; compiled ones come last, as they take minutes
    "fp32": ("eager", "channels_last", "graph", "graph+channels_last"),
    "tf32": ("eager", "channels_last", "graph", "graph+channels_last"),
    "bf16": ("channels_last", "graph+channels_last"),
}
COMPILED = "compile+channels_last"
# Of the first loss, relative: those of two computations that are the same but for rounding.
SAME_LOSS = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 2e-2}
TURN = 0.03  # seconds
COMPILES = 45  # seconds that must be left to begin with a compiled variant


def main(chosen):
    """Run the sub-command; returns its exit code."""
    seen = visible()
    if not seen.gpus:
        raise UserError(f"bench gpu needs a GPU that mpidl can compute on: {seen.reason}")
    report = Report("timing")
    settings = [parsed(text) for text in chosen.settings]
    measure(report, settings, chosen.rounds, chosen.limit, seen.gpus[0].name)
    print(markdown([report.found]))
    facts = machine.facts(chosen, {}) | {"gpu": seen.gpus[0].name}
    machine.write_json(chosen.json, facts | report.found)
    if report.failed:
        raise Fault(f"failed: {', '.join(report.failed)}")
    return 0


def parsed(text):
    """("digits", 128) of "digits:128". Raises UserError."""
    network, _, batch = text.rpartition(":")
    if not network or not batch.isdigit() or not int(batch):
        raise UserError(f"--settings must be NETWORK:BATCH, such as digits:128, found {text}")
    return network, int(batch)


def measure(report, settings, rounds, limit, gpu):
    """Time all settings, [(network, batch), ...], and fill the report: as far as one comes within
    `limit` seconds. gpu: its name."""
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        sides = Sides(folder, deadline)
        try:
            take_turns(report, [Result(*setting) for setting in settings], rounds, sides, gpu)
        finally:
            sides.close()
    report.finish()


def take_turns(report, results, rounds, sides, gpu):
    """Fill the Results and the report with what the Sides answer."""
    rate = _rates(report, sides, gpu)
    for result in results:
        if sides.left() < 10:
            report.note(f"{result.name}: no time left")
            continue
        _plain(report, result, rounds, sides)
        result.kernels = _asked(report, sides, "ours", "kernels", f"{result.name} fp32", rounds)
        _show(report, results, rate)
        sides.drop()
    for precision in PLAIN if sides.torch else ():
        for result in results:
            if sides.left() < COMPILES:
                report.note(f"{result.name}, {precision}: no time left for torch.compile")
            elif result.ms:
                _compiled(report, result, precision, rounds, sides)
                _show(report, results, rate)
                sides.drop()
    for result in results:
        _compare_losses(report, result)


class Result:
    """Of one network and batch: {(side, variant, precision): milliseconds a step}, the losses."""

    def __init__(self, network, batch, image=None):
        self.network, self.batch, self.image = network, batch, image
        self.name = f"{network} {batch}"
        self.work = floors.work(subject.network(network, image))
        self.ms, self.losses, self.kernels = {}, {}, None

    def what(self, **more):
        """Keywords of a step: this, and more."""
        return {"network": self.network, "batch": self.batch, "image": self.image, **more}


class Sides:
    """The processes that take turns, each started when it is first asked for something."""

    def __init__(self, folder, deadline):
        self.folder, self.deadline, self.alive, self.count = folder, deadline, {}, 0
        self.torch = importlib.util.find_spec("torch") is not None

    def left(self):
        """Seconds."""
        return self.deadline - time.monotonic()

    def ask(self, kind, *question):
        """What "ours" or "theirs" answers. Raises Lost; a process that is gone starts anew at the
        next question, and knows nothing."""
        if kind not in self.alive:
            self.count += 1
            command = [sys.executable, "-m", f"benchmarks.gpu.{kind}"]
            name, environment = f"{kind}-{self.count}", verify.environment()
            self.alive[kind] = turns.Side(
                name, [command], 1, environment, self.folder, max(self.left(), 10)
            )
        try:
            return self.alive[kind].ask(*question)[0]
        except turns.Lost as lost:
            if lost.reason.startswith(("ended", "no answer")):  # not one of its own errors
                self.alive.pop(kind).close()
            raise

    def drop(self):
        """Have the processes forget what was prepared."""
        for kind in list(self.alive):
            try:
                self.ask(kind, "drop")
            except turns.Lost:
                pass  # it is gone, and so is all it held

    def close(self):
        for side in self.alive.values():
            for process in side.processes:
                process.terminate()  # it may be in the middle of compiling
            side.close()


def _asked(report, sides, kind, *question):
    """The answer, or None and a note that says why there is none."""
    try:
        return sides.ask(kind, *question)
    except turns.Lost as lost:
        report.note(f"{question[0]} {question[1] if question[1:] else ''}: {lost.reason}")
        return None


def _rates(report, sides, gpu):
    """The Rates that floors are computed with, and what was measured, as facts."""
    copy = _asked(report, sides, "ours", "copy_rate")
    products = _asked(report, sides, "theirs", "product_rates") if sides.torch else None
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


def _plain(report, result, rounds, sides):
    """Time ours and all variants of PyTorch that need no compiling."""
    named = {}
    for precision in OURS:
        _prepare(report, sides, named, result, "ours", "graphs", precision)
    _prepare(report, sides, named, result, "ours", "no graphs", OURS[0])
    if sides.torch:
        for precision, variants in PLAIN.items():
            for variant in variants:
                _prepare(report, sides, named, result, "theirs", variant, precision)
    _time(report, sides, named, result, rounds)


def _compiled(report, result, precision, rounds, sides):
    """Time a compiled variant of PyTorch in turns with ours."""
    named = {}
    if not _prepare(report, sides, named, result, "theirs", COMPILED, precision):
        return
    if precision in OURS:
        _prepare(report, sides, named, result, "ours", "graphs", precision)
    _time(report, sides, named, result, rounds)


def _prepare(report, sides, named, result, kind, variant, precision):
    """Have a side make a step; whether it did. named: {its name: (key of the result, side)}."""
    if kind == "ours":
        what = result.what(precision=precision, graphs=variant == "graphs")
        name = f"{result.name} {precision}" + ("" if what["graphs"] else " no graphs")
    else:
        what = result.what(precision=precision, variant=variant)
        name = f"{result.name} {variant} {precision}"
    losses = _asked(report, sides, kind, "prepare", name, what)
    if losses is None:
        return False
    key = kind, variant, precision
    result.losses.setdefault(key, losses)
    named[name] = key
    return True


def _time(report, sides, named, result, rounds):
    """Let all that were prepared take turns, forwards and backwards by turns."""
    counts, times = {}, {name: [] for name in named}
    for i in range(-1, rounds):
        for name in list(named) if i % 2 else reversed(named):
            kind = named[name][0]
            if name not in times or sides.left() < 1:
                continue
            ms = _asked(report, sides, kind, "run", name, counts.get(name, 3))
            if ms is None:
                del times[name]
            elif i < 0:
                counts[name] = turns.steps_for(ms / 1e3, least=TURN, most=400)
            else:
                times[name].append(ms)
    for name, found in times.items():
        if found:
            result.ms.setdefault(named[name], []).extend(found)


def _compare_losses(report, result):
    """A check that each variant computes what ours does."""
    ours = result.losses.get(("ours", "graphs", "fp32"))
    for (kind, variant, precision), losses in result.losses.items() if ours else ():
        apart = abs(losses[0] / ours[0] - 1)
        if not apart <= SAME_LOSS[precision]:
            report.check(
                f"{result.name}: first loss of {kind} {variant} {precision}",
                False,
                f"{losses[0]:.8f}, that of ours {ours[0]:.8f}",
            )


def _show(report, results, rate):
    found = [result for result in results if result.ms]
    report.table(*tables.steps(found, rate))
    report.table(*tables.variants(found))
    for result in found:
        if result.kernels:
            report.table(*tables.kernels(result))
