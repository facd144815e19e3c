"""Run mpidl's training step in PyTorch: the same layers, learnables, loss and optimizer."""

import collections
import contextlib
import importlib.util

import numpy as np

from benchmarks import subject
from mpidl.errors import UserError
from mpidl.nn import Network, graph
from mpidl.ops import check
from mpidl.text import pip_install

RECURRENT = {
    "weight_ih_l0": "weight",
    "weight_hh_l0": "recurrent_weight",
    "bias_ih_l0": "bias",
    "bias_hh_l0": "recurrent_bias",
}


def is_installed() -> bool:
    """Return whether PyTorch can be imported."""
    return importlib.util.find_spec("torch") is not None


def require(command: str) -> None:
    """Raise UserError if PyTorch, which the sub-command `command` needs, is not installed."""
    if not is_installed():
        raise UserError(
            f"{command} requires PyTorch, which is not installed: run {pip_install('bench')} "
            "(a CPU-only build of PyTorch is sufficient)"
        )


class TorchStep:
    """PyTorch's training step: forward, backward, SGD with momentum.

    Subclasses choose in `build_objective` which part torch.compile compiles.

    Parameters
    ----------
    net : Network
        The mpidl network to copy.
    images, labels : np.ndarray
        Images and labels of the mini-batch.
    variant : str
        "eager", "channels_last", "compile" or "graph", or several joined by "+".
    device : str
        "cpu" or "cuda".
    precision : str
        "bf16" computes the loss under torch.autocast, and the weights stay float32. "fp64"
        computes everything in float64.

    Attributes
    ----------
    words : list of str
        The parts of the variant.
    loss : torch.Tensor
        Loss of the last step.
    """

    def __init__(
        self,
        net: Network,
        images: np.ndarray,
        labels: np.ndarray,
        variant: str,
        device: str = "cpu",
        precision: str = "fp32",
    ):
        import torch

        self.words, self.device, self.precision = variant.split("+"), device, precision
        self.loss: torch.Tensor | None = None
        self.compiles = "compile" in self.words
        # torch.compile fuses better if no layer overwrites its input; eager mode gains nothing
        self.module = build_module(net, inplace=not self.compiles).to(device)
        self.images = torch.from_numpy(images).to(device)
        self.labels = torch.from_numpy(labels).to(device)
        if precision == "fp64":
            self.module, self.images = self.module.double(), self.images.double()
        if "channels_last" in self.words:
            self.module = self.module.to(memory_format=torch.channels_last)
            self.images = self.images.contiguous(memory_format=torch.channels_last)
        self.initial = {k: v.clone() for k, v in self.module.state_dict().items()}
        self.model = self.module.train()
        self.objective = self.build_objective()
        self.reset()

    def build_objective(self):
        """Return the function that computes the loss from images and labels."""
        return self.mean_loss

    def mean_loss(self, images, labels):
        """Return the mean cross-entropy of the model's scores."""
        return cross_entropy(self.model(images), labels)

    def reset(self) -> None:
        """Restore the initial weights and create a new optimizer."""
        self.module.load_state_dict(self.initial)
        self.optimizer = make_optimizer(
            "SGD",
            self.module.parameters(),
            lr=subject.RATE,
            momentum=subject.MOMENTUM,
            # one kernel for all weights is fastest on a GPU
            fused=True if self.device == "cuda" else None,
        )

    def precision_context(self):
        """Return the context manager in which the loss is computed."""
        return autocast(self.precision, self.device)

    def step(self) -> None:
        """Run one step."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision_context():
            loss = self.objective(self.images, self.labels)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def __call__(self) -> float:
        """Run one step and return the loss."""
        self.step()
        return self.loss.item()

    def check_compiled(self) -> None:
        """Raise UserError if torch.compile compiled nothing, which it does not report itself."""
        if not self.compiles:
            return
        from torch._dynamo.utils import counters

        if not (counters["stats"]["unique_graphs"] > 0 and counters["inductor"]):
            raise UserError("torch.compile compiled nothing and ran the layers one by one")


def autocast(
    precision: str, device: str = "cpu", cache: bool = True
) -> contextlib.AbstractContextManager:
    """Return torch.autocast to bfloat16 for the precision "bf16", or else an empty context.

    `cache` is whether a weight is converted only once within the context.
    """
    import torch

    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16, cache_enabled=cache)


def cross_entropy(scores, labels):
    """Return the mean cross-entropy of scores (N, K) and labels (N,)."""
    from torch.nn import functional

    return functional.cross_entropy(scores, labels)


def make_optimizer(kind: str, parameters, **options):
    """Return the optimizer of torch.optim named `kind`."""
    import torch

    return getattr(torch.optim, kind)(parameters, **options)


def build_module(net: Network, inplace: bool = True):
    """Convert a network to a torch module with the same learnables.

    The attribute `parts` of the module holds the layers.

    Parameters
    ----------
    net : Network
        The mpidl network.
    inplace : bool
        Whether a ReLU overwrites its input if nothing else reads it. This saves memory.

    Raises
    ------
    UserError
        If this benchmark cannot convert a layer to PyTorch.
    """
    import torch
    from torch import nn

    reader_counts = collections.Counter(name for inputs in net.reads for name in inputs)
    shapes, parts = {graph.IMAGES: net.input_shape}, []
    for layer, inputs, output in zip(net.layers, net.reads, net.output_shapes, strict=True):
        part = _part(net, layer, shapes[inputs[0]], inplace and reader_counts[inputs[0]] == 1)
        part.mpidl_name = layer.name
        parts.append(part)
        shapes[layer.name] = output
    last_reads = graph.last_readers(net.reads, [(i,) for i in range(len(parts))])
    plan = list(zip(net.layer_names, net.reads, last_reads, strict=True))

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(parts)

        def forward(self, images):
            values, y = {graph.IMAGES: images}, images
            for part, (name, inputs, unused) in zip(self.parts, plan, strict=True):
                y = part(*[values[read] for read in inputs])
                for read in unused:
                    del values[read]
                values[name] = y
            return y

    module = Module()
    with torch.no_grad():
        for name, value in named_learnables(module):
            value.copy_(torch.from_numpy(net.parameters[name]).reshape(value.shape))
    return module


def named_learnables(module) -> list[tuple]:
    """Return pairs (mpidl's name, parameter) for the parameters of a `build_module` module.

    The second bias of an LSTM, which mpidl lacks, is left out.
    """
    from torch.nn import LayerNorm, PReLU
    from torch.nn.modules.batchnorm import _BatchNorm

    pairs = []
    for part in module.parts:
        names = (
            {"weight": "gamma", "bias": "beta"} if isinstance(part, (_BatchNorm, LayerNorm)) else {}
        )
        names = {"weight": "slope"} if isinstance(part, PReLU) else names
        names = RECURRENT if hasattr(part, "recurrent") else names
        for name, value in part.named_parameters():
            name = name.rpartition(".")[2]
            if name in RECURRENT and not value.requires_grad:
                continue
            pairs.append((f"{part.mpidl_name}.{names.get(name, name)}", value))
    return pairs


def _part(net, layer, shape, inplace):
    """Return the torch module that computes a layer for images of `shape`."""
    import torch
    from torch import nn

    class Sum(nn.Module):
        def forward(self, *values):
            return sum(values[1:], values[0])

    class Concat(nn.Module):
        def forward(self, *values):
            return torch.cat(values, 1)

    class Multiply(nn.Module):
        def forward(self, a, b):
            return a * (b if a.dim() == b.dim() else b[..., None, None])

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(shape[0]))

        def forward(self, x):
            return x * self.scale.view(-1, *[1] * (len(shape) - 1))

    class LayerNorm(nn.LayerNorm):  # as torchvision's LayerNorm2d
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def layer_norm():
        if layer.over == "image" or len(shape) == 1:
            return nn.LayerNorm(shape, eps=layer.epsilon)
        return LayerNorm(shape[0], eps=layer.epsilon)

    class StochasticDepth(nn.Module):
        def forward(self, x):
            ones = x.new_ones(len(x), *[1] * len(shape))
            return x * nn.functional.dropout(ones, layer.probability, self.training)

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            make = {"LSTM": nn.LSTM, "GRU": nn.GRU}[kind]
            self.recurrent = make(
                shape[0] * shape[2], layer.units, bias=layer.bias, batch_first=True
            )
            if kind == "LSTM" and layer.bias:  # mpidl has one bias: keep the sum of both
                bias = torch.zeros_like(self.recurrent.bias_hh_l0)
                self.recurrent.bias_hh_l0 = nn.Parameter(bias, requires_grad=False)

        def forward(self, x):
            rows = x.transpose(1, 2).flatten(2)
            y, _ = self.recurrent(rows.flip(1) if layer.reverse else rows)
            if layer.returns == "last":
                return y[:, -1]
            return (y.flip(1) if layer.reverse else y).transpose(1, 2)[..., None]

    kind = type(layer).__name__
    if kind in ("LSTM", "GRU") and layer.truncate is None:
        return Recurrent()
    if kind == "Conv2D":
        return _conv(layer, shape, net.parameters[f"{layer.name}.weight"].shape[2:])
    if kind in ("MaxPool2D", "AveragePool2D"):
        return _pool(layer, shape)
    if kind == "BatchNorm":
        norm = nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d
        return norm(shape[0], eps=layer.epsilon, momentum=layer.decay)
    if kind == "Dense":
        features = net.parameters[f"{layer.name}.weight"].shape[1]
        linear = nn.Linear(features, layer.outputs, bias=layer.bias)
        return nn.Sequential(nn.Flatten(), linear) if len(shape) > 1 else linear
    if kind == "CrossChannelNorm" and layer.window % 2:  # PyTorch centres even windows differently
        return nn.LocalResponseNorm(layer.window, layer.alpha, layer.beta, layer.k)
    makers = {
        "ReLU": lambda: nn.ReLU(inplace=inplace),
        "LeakyReLU": lambda: nn.LeakyReLU(layer.scale),
        "Tanh": nn.Tanh,
        "Sigmoid": nn.Sigmoid,
        "GELU": lambda: nn.GELU(approximate=layer.approximate),
        "PReLU": lambda: nn.PReLU(1 if layer.shared else shape[0], layer.initial),
        "Clip": lambda: nn.Hardtanh(layer.low, layer.high),
        "HardSwish": nn.Hardswish,
        "Swish": nn.SiLU,
        "GlobalAveragePool2D": lambda: nn.AdaptiveAvgPool2d(1),
        "Dropout": lambda: nn.Dropout(layer.probability),
        "StochasticDepth": StochasticDepth,
        "LayerNorm": layer_norm,
        "HardSigmoid": nn.Hardsigmoid,
        "Multiply": Multiply,
        "Scale": Scale,
        "Flatten": nn.Flatten,
        "Add": Sum,
        "Concat": Concat,
    }
    is_other_line = kind == "HardSigmoid" and (layer.alpha, layer.beta) != (1 / 6, 0.5)
    if kind not in makers or is_other_line:
        raise UserError(f"layer {layer.name}: this benchmark cannot convert {kind} to PyTorch")
    return makers[kind]()


def _conv(layer, shape, size):
    from torch import nn

    stride, dilation = (
        check.pair(layer.name, option, getattr(layer, option), 1)
        for option in ("stride", "dilation")
    )
    pads = check.same_or_pads(layer.name, layer.padding, shape[1:], size, stride, dilation)
    pad_modules, padding = _padding(pads, 0.0)
    options = {"stride": stride, "dilation": dilation, "groups": layer.groups, "padding": padding}
    options["bias"] = layer.bias
    return nn.Sequential(*pad_modules, nn.Conv2d(shape[0], layer.filters, size, **options))


def _pool(layer, shape):
    from torch import nn

    size, stride, pads = subject.pool_windows(layer, shape)
    kind, fill = nn.AvgPool2d, 0.0
    if type(layer).__name__ == "MaxPool2D":
        kind, fill = nn.MaxPool2d, float("-inf")
    limits = tuple(n // 2 for n in size)  # PyTorch limits padding to half the kernel size
    pad_modules, padding = _padding(pads, fill, limits)
    if kind is nn.AvgPool2d and not layer.count_padding:
        if pad_modules:
            raise UserError(
                f"layer {layer.name}: PyTorch cannot exclude the padding {pads} from the mean"
            )
        return kind(size, stride, padding, count_include_pad=False)
    return nn.Sequential(*pad_modules, kind(size, stride, padding))


def _padding(pads, fill, limits=None):
    """Return (modules to run first, the `padding` argument) for PyTorch.

    If `padding` cannot express the pads, a module pads the images instead.
    """
    from torch import nn

    (top, bottom), (left, right) = pads
    fits = limits is None or (top <= limits[0] and left <= limits[1])
    if (top, left) == (bottom, right) and fits:
        return [], (top, left)
    return [nn.ConstantPad2d((left, right, top, bottom), fill)], (0, 0)
