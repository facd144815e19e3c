"""`python -m benchmarks optimizers`: time our optimizers and PyTorch's in turns on one core."""

import argparse
import os

import numpy as np

from benchmarks import machine, report, torch_step, turns
from mpidl import backends
from mpidl.backends.cpu import arenas
from mpidl.core import keyed
from mpidl.errors import Fault
from mpidl.training.optimizers import SGDM, Adam, AdamW, RMSProp
from mpidl.training.options import configuration

# Largest relative difference of the weights after STEPS steps.
STEPS, TOLERANCE = 3, 1e-5
# mpidl's optimizer with its defaults; PyTorch's class, its options, its CPU implementations.
PAIRS = {
    "sgdm": (SGDM, "SGD", {"lr": 0.01, "momentum": 0.9}, ("fused", "foreach")),
    "adam": (Adam, "Adam", {"lr": 0.001}, ("fused", "foreach")),
    "adamw": (AdamW, "AdamW", {"lr": 0.001, "weight_decay": 0.01}, ("fused", "foreach")),
    "rmsprop": (RMSProp, "RMSprop", {"lr": 0.001, "alpha": 0.9}, ("foreach",)),
}


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    machine.refuse_launcher("optimizers")
    torch_step.require("optimizers")
    os.sched_setaffinity(0, machine.cores_of(1, options.threads)[0])
    import torch

    torch.set_num_threads(options.threads)
    backends.configure(threads=options.threads)
    print(
        f"{options.floats:,} learnables, {options.threads} thread(s), {machine.arithmetic()}, "
        f"{options.rounds} interleaved rounds",
        flush=True,
    )
    our_ms, torch_ms, ratios = {}, {}, {}
    rows = [["", "ms per step", "PyTorch's / ours"]]
    for name, (kind, torch_kind, torch_options, implementations) in PAIRS.items():
        for implementation in implementations:
            key = f"{name} {implementation}"
            torch_side = torch_optimizer(
                torch_kind, torch_options | {implementation: True}, options.floats
            )
            our_side = our_optimizer(kind(), options.floats)
            our_times, torch_times = compare(our_side, torch_side, options.rounds)
            our_ms[key] = report.summary(our_times, 1e3)
            torch_ms[key] = report.summary(torch_times, 1e3)
            ratios[key] = report.median(torch_times) / report.median(our_times)
            rows.append([name, report.spread(our_times, 1e3), ""])
            title = f"{torch_kind} {implementation}"
            rows.append([title, report.spread(torch_times, 1e3), f"{ratios[key]:.2f}"])
    report.print_table(rows, left=3)
    versions = configuration.versions_of("none") | {"torch": torch.__version__}
    record = report.header(options, versions, "floats", "threads", "rounds")
    return record | {"ours_ms": our_ms, "torch_ms": torch_ms, "ratio": ratios}


def fill(name: str, memory: np.ndarray) -> np.ndarray:
    """Fill a float32 array with random numbers in [0.1, 1.1) and return it.

    The same name gives the same numbers. Compared with such gradients, an optimizer's epsilon is
    small, so it does not matter where the formula adds it.
    """
    memory[...] = keyed.uniform(0, f"bench {name}", memory.size) + 0.1
    return memory


def our_optimizer(optimizer, floats):
    """Return two functions for one of our optimizers: run a step, and return the weights."""
    weights = {"dense.weight": fill("weights", arenas.empty((floats,)))}
    gradients = {"dense.weight": fill("gradient", arenas.empty((floats,)))}

    def step():
        weights.update(optimizer(weights, gradients))

    return step, lambda: weights["dense.weight"]


def torch_optimizer(kind, options, floats):
    """Return the functions of `our_optimizer` for the optimizer of torch.optim named `kind`."""
    import torch

    weights = torch.empty(floats)
    weights.grad = torch.empty(floats)
    fill("weights", weights.numpy())
    fill("gradient", weights.grad.numpy())
    return torch_step.make_optimizer(kind, [weights], **options).step, weights.numpy


def compare(our_side, torch_side, rounds):
    """Time two optimizers in turns.

    Parameters
    ----------
    our_side, torch_side : tuple
        The results of `our_optimizer` and `torch_optimizer`.
    rounds : int
        Number of turns of each optimizer.

    Returns
    -------
    list of list of float
        Our seconds per step and PyTorch's seconds per step, one number per round.

    Raises
    ------
    Fault
        If the weights differ by more than TOLERANCE after STEPS steps.
    """
    sides = our_side, torch_side
    for step, _ in sides:
        for _ in range(STEPS):
            step()
    ours, expected = (weights() for _, weights in sides)
    error = np.abs(ours - expected).max() / np.abs(expected).max()
    if not error < TOLERANCE:
        raise Fault(f"after {STEPS} steps the weights differ by {error:.1e}")
    times = [], []
    count = turns.steps_for(turns.seconds(our_side[0]), 0.1)
    for _, side in turns.alternate((0, 1), rounds):
        times[side].append(report.median(turns.timed_steps(sides[side][0], count)))
    return times
