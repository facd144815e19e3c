"""`python -m benchmarks`: measure mpidl and other libraries in turns, and print ratios.

Each sub-command has a module. The sides of a comparison run in separate processes (`turns`): ours
in `ours`, PyTorch's in `theirs`, and other libraries' in `others`. `subject` defines the network
and the mini-batch for all of them. `mpidl_step` and `torch_step` implement the training step.
`report` writes JSON files and tables, and `gpu` contains the GPU benchmarks.
"""

from benchmarks import (
    accuracy,
    against,
    arguments,
    compare,
    fold,
    input,
    interchange,
    kernels,
    logging,
    machine,
    monitor,
    optimizers,
    pretrained,
    report,
    resident,
    s3,
    saves,
    step,
    sweep,
    timeline,
    transfer,
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
    "against": against.main,
    "input": input.main,
    "s3": s3.main,
    "optimizers": optimizers.main,
    "interchange": interchange.main,
    "transfer": transfer.main,
    "gpu": speed.main,
    "pretrained": pretrained.main,
    "sweep": sweep.main,
    "timeline": timeline.main,
    "monitor": monitor.main,
    "logging": logging.main,
    "saves": saves.main,
    "memory": resident.main,
}


def main(argv=None):
    """Run the command and return its exit code."""
    options = arguments.parse(argv, quiet=failure.launched_rank() > 0)
    report.prepare_json(options.json)
    options.busy = machine.busy()
    for line in start.without_kernels() if failure.launched_rank() == 0 else []:
        print(line)
    if options.busy > 0.1 and failure.launched_rank() == 0:
        print(
            f"warning: the cores are {options.busy * 100:.0f} % busy already, so the times are "
            "unreliable"
        )
    try:
        record = COMMANDS[options.command](options)
    except turns.Lost as lost:
        raise Fault(str(lost)) from None
    report.write_json(options.json, record)
    return 0
