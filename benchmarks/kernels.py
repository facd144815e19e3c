"""`python -m benchmarks kernels`: compare each pass of each layer with the limits of the core.

GFLOP/s are effective: the number of operations of the direct algorithm (two per multiply-add)
divided by the time. Winograd kernels can therefore exceed the peak. Passes that mostly move memory
are reported in GB/s and compared with the speed of a copy. The bytes count each array that must be
read or written once. Large fully connected layers are also compared with one BLAS sgemm of the
whole mini-batch, called through NumPy. On one thread, times are processor time, so that other
programs disturb them less.
"""

import argparse
import time

import numpy as np

from benchmarks import machine, passes, report, subject, turns
from mpidl.backends.cpu import builds
from mpidl.core.blocks import LANES
from mpidl.training.options import configuration

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


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
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
        for case in passes.cases(network, options):
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
    our_seconds = _repeated(case.run, yardsticks.clock)
    sgemm_seconds = case.sgemm and _repeated(case.sgemm, yardsticks.clock)
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


def _repeated(run, clock):
    """Return a function that repeats `run` for ENOUGH seconds and returns mean seconds per call."""
    run()
    count = max(1, min(1000, round(ENOUGH / max(turns.seconds(run, clock), 1e-9))))

    def repeat():
        for _ in range(count):
            run()

    return lambda: turns.seconds(repeat, clock) / count


def table_row(case, figures):
    """Return the table row of a case, with the columns of HEAD."""
    texts = (
        "" if figures.get(name) is None else text.format(figures[name])
        for name, text in UNITS.items()
    )
    return [case.layer, case.name, *texts]


class Yardsticks:
    """Peak rates of the core for products and for copies. The rates are measured next to each case.

    `clock` measures processor time for one thread, else the time of day.
    """

    def __init__(self, threads):
        self.threads, self.kernels = threads, builds.kernels()
        self.clock = time.thread_time if threads == 1 else time.perf_counter
        self.flops, self.copies = [], []
        self.factors = np.repeat(np.array([0.999, 0.001], np.float32), LANES)
        self.array = np.ones(16 << 20, np.float32)  # 64 MiB; its copy needs another 64 MiB
        self.target = np.ones_like(self.array)

    def products(self):
        """Return the measured FLOP/s of all cores in use, or None without C kernels."""
        if self.kernels is None:
            return None
        self.factors[:LANES] = 0.999
        start = self.clock()
        counted = self.kernels.fma_peak(1_000_000, self.factors) * self.threads
        self.flops.append(counted / (self.clock() - start))
        return self.flops[-1]

    def copy(self):
        """Return the measured bytes/s of a copy by one core, because all cores share the memory."""
        start = self.clock()
        if self.kernels is None:
            np.copyto(self.target, self.array)
        else:
            self.kernels.copy(self.array, self.target, self.array.size)
        self.copies.append(2 * self.array.nbytes / (self.clock() - start))
        return self.copies[-1]

    def bandwidth(self, rounds):
        """Return the measured bytes/s of an update in place by one core; median over the rounds.

        A copy is slower, because the core reads the lines that it is going to overwrite.
        """

        def update():
            np.multiply(self.array, np.float32(1), out=self.array)

        times = [turns.seconds(update, self.clock) for _ in range(rounds)]
        return 2 * self.array.nbytes / report.median(times)

    def medians(self):
        """Return the medians (GFLOP/s, GB/s). A rate that was not measured is None."""
        return tuple(np.median(x) / 1e9 if x else None for x in (self.flops, self.copies))

    def __str__(self):
        flops, copy = self.medians()
        peak = "not measured: no C kernels" if flops is None else f"{flops:.1f} GFLOP/s"
        moved = "not measured" if copy is None else f"{copy:.1f} GB/s read and written"
        return f"peak of multiply-adds: {peak}; copy of 64 MiB: {moved}"
