"""`python -m benchmarks`: measure mpidl and other libraries alternately, and print ratios.

Each sub-command has a module. A "side" of a comparison is a library or a way to run it. The sides
run in separate processes, which take turns (`turns`). `ours` implements mpidl's side, `theirs`
PyTorch's side, and `others` the sides of other libraries. `subject` defines the network and the
mini-batch for all sides. `mpidl_step` and `torch_step` implement the training step. `report` writes
JSON files and tables, and `gpu` contains the GPU benchmarks.
"""

import importlib

from benchmarks import arguments, report, turns
from mpidl.cli import start
from mpidl.errors import Fault
from mpidl.ranks import failure, thread_budget

# Modules of sub-commands whose names differ; a module "logging" would hide Python's module.
MODULES = {"gpu": "gpu.speed", "logging": "records"}


def main(argv=None):
    """Run the command and return its exit code."""
    options = arguments.parse(argv, quiet=failure.launched_rank() > 0)
    report.prepare_json(options.json)
    options.busy = thread_budget.busy_share()
    for line in start.without_kernels() if failure.launched_rank() == 0 else []:
        print(line)
    if options.busy > thread_budget.BUSY_SHARE and failure.launched_rank() == 0:
        print(
            f"warning: the cores are already {options.busy * 100:.0f} % busy, so the times are "
            "unreliable"
        )
    try:
        name = MODULES.get(options.command, options.command)
        record = importlib.import_module(f"benchmarks.{name}").main(options)
    except turns.Lost as lost:
        raise Fault(str(lost)) from None
    report.write_json(options.json, record)
    return 0
