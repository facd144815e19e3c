"""Run PyTorch's side of the GPU timing: `python -m benchmarks.gpu.theirs DEVICE ADDRESS`.

This side has the same layers, initial weights and images as mpidl's side. The images are stored on
the GPU in the layout that the network uses. A variant consists of one or more of these words,
joined by "+":

    eager          PyTorch runs op by op
    compile        torch.compile(mode="max-autotune") compiles the network and the loss
    graph          one torch.cuda.CUDAGraph holds the whole step, including SGD
    channels_last  images and weights have PyTorch's channels_last layout

The precision is "fp32" (no TF32), "tf32" (for convolutions and matrix products) or "bf16"
(torch.autocast, float32 weights).
"""

import os
import sys
import time

from benchmarks import subject, torch_step, turns

WARMUP = 11  # steps before a capture, enough for PyTorch to choose kernels; DDP needs 11
PRODUCT_SIZE = 8192  # size of square matrices; their product keeps the tensor cores busy


def main(argv=None):
    """Serve the requests of the benchmark at the address in `argv`; see `turns`."""
    device, address = sys.argv[1:] if argv is None else argv
    steps = {}

    def prepare(name, options):
        """Create a GpuStep with these options, store it by name and return its first losses."""
        if device == "cpu" and {"graph", "compile"} & set(options["variant"].split("+")):
            raise ValueError(f"{options['variant']}: only on a GPU")
        steps[name] = GpuStep(**options, device=device)
        return steps[name].first_losses

    def run(name, count):
        return steps[name].run(count)

    def drop():
        import torch
        import torch._dynamo.utils

        steps.clear()
        torch._dynamo.reset()  # otherwise the next network exceeds the recompile limit
        torch._dynamo.utils.counters.clear()
        torch.cuda.empty_cache()

    def rates():
        size = PRODUCT_SIZE if device == "cuda" else 64
        return product_rates(size=size, device=device)

    turns.serve(address, 0, prepare, run, drop, rates)
    os._exit(0)  # some libraries have threads that do not end by themselves


class GpuStep(torch_step.TorchStep):
    """PyTorch's training step on a GPU.

    Parameters
    ----------
    network : str
        A value of `--network`.
    batch : int
        Number of images in the mini-batch.
    variant, precision : str
        Variant and precision of the step, as described in the module's docstring.
    image : sequence of int or None
        Image shape (C, H, W). None means the default shape of the network.
    device : str
        "cuda". Tests without graphs use "cpu".

    Attributes
    ----------
    first_losses : list of float
        Losses of the first three steps from the initial weights.
    """

    def __init__(self, network, batch, variant, precision="fp32", image=None, device="cuda"):
        self.graph = None
        net = subject.network(network, image, dropout=False)
        images, labels = subject.mini_batch(net.input_shape, batch)
        super().__init__(net, images, labels, variant, device, precision)
        self._configure()
        self.first_losses = [self() for _ in range(3)]
        self.check_compiled()
        if "graph" in self.words:
            self._capture()
        self.run(3)

    def build_objective(self):
        """Return the loss function, compiled as a whole if the variant compiles."""
        import torch

        if self.compiles:
            return torch.compile(self.mean_loss, mode="max-autotune")
        return self.mean_loss

    def _configure(self):
        """Set the process-wide options of PyTorch to the values that this step needs."""
        import torch

        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"

    def precision_context(self):
        """Return the context manager in which the loss is computed."""
        # a captured graph must not reuse casts from an earlier replay
        return torch_step.autocast(self.precision, self.device, cache="graph" not in self.words)

    def step(self):
        """Run one step."""
        import torch

        if self.compiles:
            torch.compiler.cudagraph_mark_step_begin()
        super().step()

    def _capture(self):
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.loss = None
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.graph = graph

    def run(self, count: int) -> float:
        """Run `count` consecutive steps and return the mean milliseconds per step."""
        self._configure()
        step = self.step if self.graph is None else self.graph.replay
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


def product_rates(
    seconds: float = 0.3, size: int = PRODUCT_SIZE, device: str = "cuda"
) -> dict[str, float]:
    """Return the FLOP/s of a matrix product by precision: "fp32", "tf32" and "bf16"."""
    import torch

    rates = {}
    for precision in ("fp32", "tf32", "bf16"):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        c, times, start = a @ b, [], time.monotonic()
        while len(times) < 3 or time.monotonic() - start < seconds:
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
