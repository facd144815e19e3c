"""A process of PyTorch's side of a comparison: `python -m benchmarks.theirs TASK ADDRESS`.

It has the same layers, initial weights and images as mpidl's side. Several processes are
DistributedDataParallel over gloo, with batch normalization by each process's share, because
SyncBatchNorm does not run on CPUs.
"""

import argparse
import gc
import os
import sys

from benchmarks import machine, subject, torch_step, turns
from mpidl.comm.launcher import environment


def main(argv=None):
    """Take part until the other end hangs up; argv: the task, as JSON, and the address."""
    job, address = subject.join(argv)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(job.threads)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes beside those that take turns
    import torch

    torch.set_num_threads(job.threads)
    torch.set_num_interop_threads(1)
    barrier = _join_group(job) if job.ranks > 1 else (lambda: None)
    net, images, labels = subject.prepare(job)
    count = len(images) // job.ranks
    part = slice(job.rank * count, (job.rank + 1) * count)
    step = CpuStep(net, images[part], labels[part], job.variant, job.ranks)

    def describe():
        return {
            "versions": {"torch": torch.__version__},
            "arithmetic": torch.backends.cpu.get_cpu_capability(),
        }

    def losses(count):
        values = [step() for _ in range(count)]
        step.reset()
        step.check_compiled()
        return values

    def memory(count):
        """Peak of some steps in bytes, above what the process holds without gradients.

        Earlier steps have compiled the model, so that neither compiling nor what the library
        keeps from then on counts.
        """
        step.reset()
        step.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        return machine.peak_of_steps(step, count)

    def steps(count):
        return turns.timed_steps(step, count, barrier)

    turns.serve(address, job.rank, describe, losses, memory, steps)
    os._exit(0)  # the threads of some libraries do not end by themselves


def _join_group(job):
    """Join the group of processes; return its barrier."""
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{job.meeting}"
    distributed.init_process_group("gloo", meeting, rank=job.rank, world_size=job.ranks)
    return distributed.barrier


class CpuStep(torch_step.TorchStep):
    """PyTorch's training step on a CPU, by one of several processes."""

    def __init__(self, net, images, labels, variant, ranks=1):
        self.ranks = ranks
        super().__init__(net, images, labels, variant)

    def build_objective(self):
        """Return the loss function; torch.compile gets the model alone."""
        import torch

        if self.ranks > 1:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        if self.compiles:
            self.model = torch.compile(self.model)
        return self.mean_loss


def side(
    variant: str,
    options: argparse.Namespace,
    folder: str,
    *,
    ranks: int,
    variables: dict[str, str] | None = None,
) -> turns.Side:
    """Return a Side of PyTorch processes.

    Parameters
    ----------
    variant : str
        "eager", "channels_last", "compile" or "compile+channels_last".
    options : argparse.Namespace
        The command's options.
    folder : str
        Folder for the side's files.
    ranks : int
        How many processes to start.
    variables : dict or None
        Environment variables to add.

    Raises
    ------
    Lost
        If the processes cannot be started.
    """
    cores = machine.cores_of(ranks, options.threads)
    meeting = os.path.join(folder, f"{variant}.meeting")
    shared = {"variant": variant, "ranks": ranks, "meeting": meeting}
    tasks = [subject.task(options, cores, rank=rank, **shared) for rank in range(ranks)]
    commands = [[sys.executable, "-m", "benchmarks.theirs", task] for task in tasks]
    variables = environment() | (variables or {})
    patience = max(options.timeout, 900.0)  # compiling takes its time
    return turns.Side(variant, commands, ranks, variables, folder, patience)


if __name__ == "__main__":
    main()
