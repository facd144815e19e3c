"""PyTorch's side of a comparison, a process of it: `python -m benchmarks.theirs WHAT ADDRESS`.

The same layers, initial weights and images as ours. Several processes are DistributedDataParallel
over gloo, with batch normalization by each process's share (SyncBatchNorm knows no CPU).
"""

import gc
import json
import os
import sys

from benchmarks import machine, modules, subject, turns
from mpidl.cli import verify
from mpidl.errors import UserError


def main(argv=None):
    """Take part until the other end hangs up; argv: what to run, as JSON, and the address."""
    text, address = sys.argv[1:] if argv is None else argv
    what = json.loads(text)
    os.sched_setaffinity(0, what["cores"])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(what["threads"])
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes beside those that take turns
    import torch

    torch.set_num_threads(what["threads"])
    torch.set_num_interop_threads(1)
    ranks, rank = what["ranks"], what["rank"]
    barrier = _meet(what) if ranks > 1 else (lambda: None)
    net = subject.network(what["network"], what["image"], what["seed"], dropout=False)
    images, labels = subject.mini_batch(net.input_shape, what["batch_size"], what["seed"])
    count = len(images) // ranks
    mine = slice(rank * count, (rank + 1) * count)
    step = Step(net, images[mine], labels[mine], what["variant"], ranks)

    def about():
        return {
            "versions": {"torch": torch.__version__},
            "arithmetic": torch.backends.cpu.get_cpu_capability(),
        }

    def losses(count):
        found = [step() for _ in range(count)]
        step.reset()
        if "compile" in what["variant"] and not _compiled():
            raise UserError("torch.compile compiled nothing, and ran the layers one by one")
        return found

    def memory(count):
        """Bytes above what this process held before these steps, with no gradients yet.

        It has made other steps before: what compiling takes is no part of it, nor is what the
        library keeps from then on.
        """
        step.reset()
        step.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        before = machine.start_of_peak()
        for _ in range(count):
            step()
        return machine.peak() - before

    def steps(count):
        return turns.timed_steps(step, count, barrier)

    turns.serve(address, rank, {f.__name__: f for f in (about, losses, memory, steps)})
    os._exit(0)  # nothing is left to do, and the threads of some libraries do not end by themselves


def _meet(what):
    """Join the group of processes; returns its barrier."""
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{what['meeting']}",
        rank=what["rank"],
        world_size=what["ranks"],
    )
    return distributed.barrier


def _compiled():
    """Whether torch.compile made code: where it cannot, it may pass over a model silently."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"] > 0 and bool(counters["inductor"])


class Step:
    """PyTorch's training step: forward, backward, SGD with momentum."""

    def __init__(self, net, images, labels, variant, ranks=1):
        import torch

        # what torch.compile fuses is faster where no layer overwrites what it reads; eager is not
        self.module = modules.module(net, inplace="compile" not in variant)
        self.images, self.labels = torch.from_numpy(images), torch.from_numpy(labels)
        if "channels_last" in variant:
            self.module = self.module.to(memory_format=torch.channels_last)
            self.images = self.images.contiguous(memory_format=torch.channels_last)
        self.initial = {k: v.clone() for k, v in self.module.state_dict().items()}
        self.model = self.module.train()
        if ranks > 1:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        if "compile" in variant:
            self.model = torch.compile(self.model)
        self.reset()

    def reset(self):
        """Begin again with the initial weights."""
        import torch

        self.module.load_state_dict(self.initial)
        self.optimizer = torch.optim.SGD(
            self.module.parameters(), lr=subject.RATE, momentum=subject.MOMENTUM
        )

    def __call__(self):
        """Make one step; returns the loss, a number."""
        from torch.nn.functional import cross_entropy

        self.optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def side(variant, chosen, folder, *, ranks, environment=None):
    """A Side of PyTorch processes; chosen: the command's arguments. Raises Lost."""
    cores = machine.cores_of(ranks, chosen.threads)
    commands = []
    for rank in range(ranks):
        what = {
            "network": chosen.network,
            "image": chosen.image,
            "batch_size": chosen.batch_size,
            "seed": chosen.seed,
            "threads": chosen.threads,
            "variant": variant,
            "ranks": ranks,
            "rank": rank,
            "meeting": os.path.join(folder, f"{variant}.meeting"),
            "cores": cores[rank],
        }
        commands.append([sys.executable, "-m", "benchmarks.theirs", json.dumps(what)])
    environment = verify.environment() | (environment or {})
    patience = max(chosen.timeout, 900.0)  # compiling takes its time
    return turns.Side(variant, commands, ranks, environment, folder, patience)


if __name__ == "__main__":
    main()
