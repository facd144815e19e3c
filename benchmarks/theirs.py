"""Run a process of PyTorch's side of a comparison: `python -m benchmarks.theirs TASK ADDRESS`.

This side has the same layers, initial weights and images as mpidl's side. Several processes use
DistributedDataParallel over gloo. Batch normalization then uses the statistics of each process's
share, because SyncBatchNorm does not run on CPUs.
"""

import argparse
import gc
import os

from benchmarks import machine, onednn, prediction, subject, torch_step, turns


def main(argv=None):
    """Serve the requests of the benchmark (see `turns`) until it closes the connection.

    `argv` holds the task, as JSON, and the address of the socket.
    """
    job, address = subject.join(argv)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(job.threads)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no compiler processes outside the turns
    import torch

    torch.set_num_threads(job.threads)
    torch.set_num_interop_threads(1)
    barrier = _join_group(job) if job.ranks > 1 else (lambda: None)
    net, images, labels = subject.prepare(job)
    count = len(images) // job.ranks
    part = slice(job.rank * count, (job.rank + 1) * count)

    def describe():
        return {
            "versions": {"torch": torch.__version__},
            "arithmetic": torch.backends.cpu.get_cpu_capability(),
        }

    if job.predict:
        scores = prediction.torch_pass(net, images, job.variant, job.precision)
        prediction.serve(address, scores, labels, describe, implementations_in(scores))
        os._exit(0)
    step = CpuStep(
        net, images[part], labels[part], job.variant, ranks=job.ranks, precision=job.precision
    )

    def losses(count):
        values = [step() for _ in range(count)]
        step.reset()
        step.check_compiled()
        return values

    def memory(count):
        """Return the peak memory of some steps in bytes, above the memory held without gradients.

        Earlier steps have already compiled the model. The peak therefore excludes memory for
        compiling, and memory that the library has kept from earlier steps.
        """
        step.reset()
        step.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        return machine.peak_of_steps(step, count)

    def steps(count):
        return turns.timed_steps(step, count, barrier)

    actions = describe, losses, memory, steps, implementations_in(step)
    turns.serve(address, job.rank, *actions)
    os._exit(0)  # some libraries have threads that do not end by themselves


def implementations_in(step):
    """Return an action that runs a step and returns the oneDNN implementations in it."""

    def implementations():
        return onednn.implementations(onednn.verbose_output(step))

    return implementations


def _join_group(job):
    """Join the process group and return its barrier function."""
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{job.meeting}"
    distributed.init_process_group("gloo", meeting, rank=job.rank, world_size=job.ranks)
    return distributed.barrier


class CpuStep(torch_step.TorchStep):
    """PyTorch's training step on a CPU, in one of `ranks` processes."""

    def __init__(self, net, images, labels, variant, *, ranks=1, precision="fp32"):
        self.ranks = ranks
        super().__init__(net, images, labels, variant, precision=precision)

    def build_objective(self):
        """Return the loss function; torch.compile compiles only the model."""
        import torch

        if self.ranks > 1:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        if self.compiles:
            self.model = torch.compile(self.model)
        return self.mean_loss


def side(
    name: str,
    variant: str,
    python: str,
    options: argparse.Namespace,
    folder: str,
    *,
    ranks: int,
    variables: dict[str, str] | None = None,
) -> turns.Side:
    """Start PyTorch processes and return their Side.

    Parameters
    ----------
    name : str
        Name of the side.
    variant : str
        See `torch_step.TorchStep`.
    python : str
        The Python interpreter that has PyTorch.
    options : argparse.Namespace
        Parsed command line of the sub-command.
    folder : str
        Folder for the socket and the log.
    ranks : int
        Number of processes to start.
    variables : dict or None
        Environment variables to add.

    Raises
    ------
    Lost
        If the processes cannot be started.
    """
    cores = machine.cores_of(ranks, options.threads)
    meeting = os.path.join(folder, f"{name}.meeting")
    shared = {"variant": variant, "ranks": ranks, "meeting": meeting, "predict": options.predict}
    tasks = [subject.task(options, cores, rank=rank, **shared) for rank in range(ranks)]
    commands = [[python, "-m", "benchmarks.theirs", task] for task in tasks]
    variables = turns.environment_of_checkout() | (variables or {})
    patience = max(options.timeout, turns.PATIENCE)
    return turns.Side(name, commands, ranks, variables, folder, patience)


if __name__ == "__main__":
    main()
