"""`python -m mpidl.bench`: measurements, as ratios of things that take turns in one run.

A sub-command a file. What is compared runs in processes of its own (`turns`), ours in `ours`,
PyTorch's in `theirs`; `subject` is what they all compute.
"""

from mpidl.cli import arguments
from mpidl.cli.bench import accuracy, compare, fold, kernels, machine, step
from mpidl.comm import guard

COMMANDS = {
    "step": step.main,
    "kernels": kernels.main,
    "accuracy": accuracy.main,
    "fold": fold.main,
    "compare": compare.main,
}


def main(argv=None):
    """Run the command; returns its exit code."""
    chosen = arguments.bench(argv, quiet=guard.launched_rank() > 0)
    machine.prepare_json(chosen.json)
    return COMMANDS[chosen.what](chosen)
