"""`python -m benchmarks`: measurements, as ratios of things that take turns in one run.

A sub-command a file. What is compared runs in processes of its own (`turns`), ours in `ours`,
PyTorch's in `theirs`; `subject` is what they all compute. What is measured on a GPU is in `gpu`.
"""

from benchmarks import (
    accuracy,
    arguments,
    compare,
    fold,
    input,
    kernels,
    machine,
    optimizers,
    step,
    turns,
)
from benchmarks.gpu import speed
from mpidl.cli import start
from mpidl.comm import failure
from mpidl.errors import Fault

COMMANDS = {
    "step": step.main,
    "kernels": kernels.main,
    "accuracy": accuracy.main,
    "fold": fold.main,
    "compare": compare.main,
    "input": input.main,
    "optimizers": optimizers.main,
    "gpu": speed.main,
}


def main(argv=None):
    """Run the command; returns its exit code."""
    chosen = arguments.parse(argv, quiet=failure.launched_rank() > 0)
    machine.prepare_json(chosen.json)
    chosen.busy = machine.busy()
    for line in start.without_kernels() if failure.launched_rank() == 0 else []:
        print(line)
    if chosen.busy > 0.1 and failure.launched_rank() == 0:
        print(f"warning: the cores are {chosen.busy * 100:.0f} % busy already: times mean little")
    try:
        return COMMANDS[chosen.what](chosen)
    except turns.Lost as lost:
        raise Fault(str(lost)) from None
