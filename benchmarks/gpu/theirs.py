"""PyTorch's side of the timing: `python -m benchmarks.gpu.theirs ADDRESS`.

The same layers, initial weights and images as ours, which lie on the GPU as the network takes
them. A variant is some of these, joined by "+":

    eager          op by op
    compile        network and loss by torch.compile(mode="max-autotune")
    graph          the whole step, SGD too, captured by hand as one torch.cuda.CUDAGraph
    channels_last  images and weights in that order

and a precision: "fp32" (TF32 nowhere), "tf32" (for convolutions and matrix products), "bf16"
(torch.autocast, float32 weights).
"""

import contextlib
import os
import sys
import time

from benchmarks import modules, subject, theirs, turns
from mpidl.errors import UserError

WARM = 11  # steps before a capture, as DistributedDataParallel would need; enough to choose kernels
FULL = 8192  # rows and columns of the product that shows what the tensor cores do


def main(argv=None):
    """Take part until the other end hangs up; argv: the address."""
    (address,) = sys.argv[1:] if argv is None else argv
    made = {}

    def prepare(name, what):
        """Make the step `what`, keywords of Step, under a name; the losses of its first steps."""
        made[name] = Step(**what)
        return made[name].first_losses

    def run(name, count):
        return made[name].run(count)

    def drop():
        import torch
        import torch._dynamo.utils

        made.clear()
        torch._dynamo.reset()  # or the next network would be one variant too many of the same code
        torch._dynamo.utils.counters.clear()
        torch.cuda.empty_cache()

    actions = {f.__name__: f for f in (prepare, run, drop, product_rates)}
    turns.serve(address, 0, actions)
    os._exit(0)  # nothing is left to do, and the threads of some libraries do not end by themselves


class Step:
    """PyTorch's training step: forward, backward, SGD with momentum.

    first_losses: those of its first three steps, from the initial weights. device: "cuda", or in
    tests "cpu", where there are no graphs.
    """

    def __init__(self, network, batch, variant, precision="fp32", image=None, device="cuda"):
        import torch

        self.words, self.precision, self.device = variant.split("+"), precision, device
        net = subject.network(network, image, dropout=False)
        images, labels = subject.mini_batch(net.input_shape, batch)
        self.module = modules.module(net, inplace="compile" not in self.words).to(device)
        self.images = torch.from_numpy(images).to(device)
        self.labels = torch.from_numpy(labels).to(device)
        if "channels_last" in self.words:
            self.module = self.module.to(memory_format=torch.channels_last)
            self.images = self.images.contiguous(memory_format=torch.channels_last)
        self.module.train()
        self.objective = self._objective
        if "compile" in self.words:
            self.objective = torch.compile(self._objective, mode="max-autotune")
        self.optimizer = torch.optim.SGD(
            self.module.parameters(),
            lr=subject.RATE,
            momentum=subject.MOMENTUM,
            fused=device == "cuda",  # one kernel for all weights, the fastest there is
        )
        self.loss, self.graph = None, None
        self._choose()
        self.first_losses = [self._one() for _ in range(3)]
        if "compile" in self.words and not theirs._compiled():
            raise UserError("torch.compile compiled nothing, and ran the layers one by one")
        if "graph" in self.words:
            self._capture()
        self.run(3)

    def _objective(self, images, labels):
        from torch.nn.functional import cross_entropy

        return cross_entropy(self.module(images), labels)

    def _choose(self):
        """Set what holds for all steps of this process as this one needs it."""
        import torch

        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"

    def _half(self, **options):
        import torch

        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16, **options)

    def _step(self):
        import torch

        if "compile" in self.words:
            torch.compiler.cudagraph_mark_step_begin()
        self.optimizer.zero_grad(set_to_none=True)
        # within a capture nothing may be kept from one time to the next
        with self._half(cache_enabled="graph" not in self.words):
            loss = self.objective(self.images, self.labels)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def _one(self):
        self._step()
        return self.loss.item()

    def _capture(self):
        import torch

        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM):
                self._step()
        torch.cuda.current_stream().wait_stream(beside)
        self.loss = None
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.graph = graph

    def run(self, count):
        """Milliseconds of a step, the mean over so many that follow each other."""
        self._choose()
        step = self._step if self.graph is None else self.graph.replay
        if self.device == "cpu":
            return turns.seconds(lambda: [step() for _ in range(count)]) / count * 1e3
        import torch

        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            step()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / count


def product_rates(seconds=0.3, size=FULL, device="cuda"):
    """{"fp32", "tf32", "bf16": FLOP/s of a product of two square matrices} of random numbers."""
    import torch

    rates = {}
    for precision in ("fp32", "tf32", "bf16"):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        c, times, began = a @ b, [], time.monotonic()
        while len(times) < 3 or time.monotonic() - began < seconds:
            before = _now(device)
            torch.mm(a, b, out=c)
            times.append(_now(device) - before)
        rates[precision] = 2 * size**3 / sorted(times)[len(times) // 2]
    return rates


def _now(device):
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
