"""`python -m benchmarks optimizers`: our optimizers' steps and PyTorch's, in turns on one core."""

import importlib.util
import os

import numpy as np

from benchmarks import machine, turns
from mpidl import backends, keyed
from mpidl.backends.cpu import arenas
from mpidl.errors import Fault, UserError
from mpidl.training.optimizers import SGDM, Adam, RMSProp
from mpidl.training.options import configuration

STEPS, SAME = 3, 1e-5  # relative difference of the weights after so many steps
# Each of ours at its defaults; PyTorch's class, its options, and the ways it runs on a CPU.
PAIRS = {
    "sgdm": (SGDM, "SGD", {"lr": 0.01, "momentum": 0.9}, ("fused", "foreach")),
    "adam": (Adam, "Adam", {"lr": 0.001}, ("fused", "foreach")),
    "rmsprop": (RMSProp, "RMSprop", {"lr": 0.001, "alpha": 0.9}, ("foreach",)),
}


def main(chosen):
    """Run the sub-command; returns its exit code."""
    if machine.launched():
        raise UserError("optimizers measures one process: run it without mpirun")
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "optimizers needs PyTorch, which is not installed: pip install '.[bench]' (its "
            "build for CPUs will do)"
        )
    os.sched_setaffinity(0, machine.cores_of(1, chosen.threads)[0])
    import torch

    torch.set_num_threads(chosen.threads)
    backends.configure(threads=chosen.threads)
    print(
        f"{chosen.floats:,} learnables, {chosen.threads} thread(s), {machine.arithmetic()}, "
        f"{chosen.rounds} rounds in turns\n{'':20}{'ms a step':38}PyTorch's / ours"
    )
    mine, others = {}, {}
    for name, (kind, their_kind, how, ways) in PAIRS.items():
        for way in ways:
            key = f"{name} {way}"
            mine[key], others[key] = compared(
                ours(kind(), chosen.floats),
                theirs(getattr(torch.optim, their_kind), how | {way: True}, chosen.floats),
                chosen.rounds,
            )
            ratio = machine.median(others[key]) / machine.median(mine[key])
            print(f"{name:20}{machine.spread(mine[key], 1e3)}")
            print(f"{their_kind + ' ' + way:20}{machine.spread(others[key], 1e3):38}{ratio:.2f}")
    versions = configuration.versions_of("none") | {"torch": torch.__version__}
    result = {
        "floats": chosen.floats,
        "threads": chosen.threads,
        "rounds": chosen.rounds,
        "ours_ms": {key: machine.summary(times, 1e3) for key, times in mine.items()},
        "torch_ms": {key: machine.summary(times, 1e3) for key, times in others.items()},
        "ratio": {k: machine.median(others[k]) / machine.median(mine[k]) for k in mine},
    }
    machine.write_json(chosen.json, machine.facts(chosen, versions) | result)
    return 0


def drawn(what, memory):
    """Weights or a gradient, float32 between 0.1 and 1.1, in a side's own memory: beside such a
    gradient an epsilon is small, wherever it is added."""
    memory[...] = keyed.uniform(0, f"bench {what}", memory.size) + 0.1
    return memory


def ours(optimizer, floats):
    """(a function that makes a step, one that gives the weights)."""
    held = {"dense.weight": drawn("weights", arenas.empty((floats,)))}
    gradients = {"dense.weight": drawn("gradient", arenas.empty((floats,)))}

    def step():
        held.update(optimizer(held, gradients))

    return step, lambda: held["dense.weight"]


def theirs(kind, options, floats):
    """The same for one of torch.optim."""
    import torch

    weights = torch.empty(floats)
    weights.grad = torch.empty(floats)
    drawn("weights", weights.numpy())
    drawn("gradient", weights.grad.numpy())
    return kind([weights], **options).step, weights.numpy


def compared(us, them, rounds):
    """(our seconds a step, theirs), lists of a number a round. Raises Fault where the weights after
    some steps are not the same."""
    sides = us, them
    for step, _ in sides:
        for _ in range(STEPS):
            step()
    mine, other = (weights() for _, weights in sides)
    apart = np.abs(mine - other).max() / np.abs(other).max()
    if not apart < SAME:
        raise Fault(f"after {STEPS} steps the weights are {apart:.1e} apart")
    times = [], []
    count = turns.steps_for(turns.seconds(us[0]), 0.1)
    for i in range(rounds):
        for side in (0, 1) if i % 2 == 0 else (1, 0):
            times[side].append(machine.median(turns.timed_steps(sides[side][0], count)))
    return times
