"""A Network as a PyTorch module: the same layers, with its learnables."""

import collections

from mpidl.errors import UserError
from mpidl.nn import graph
from mpidl.ops import check
from mpidl.ops.pool import windows


def module(net, inplace=True):
    """The network as a torch module whose `parts` are its layers. Raises UserError.

    inplace: whether a ReLU overwrites what it alone reads, which takes less memory.
    """
    import torch
    from torch import nn

    readers = collections.Counter(name for reads in net.reads for name in reads)
    shapes, parts = {graph.IMAGES: net.input_shape}, []
    for layer, reads, output in zip(net.layers, net.reads, net.output_shapes, strict=True):
        part = _part(net, layer, shapes[reads[0]], inplace and readers[reads[0]] == 1)
        part.mpidl_name = layer.name
        parts.append(part)
        shapes[layer.name] = output
    ends = graph.last_readers(net.reads, [(i,) for i in range(len(parts))])
    plan = list(zip(net.layer_names, net.reads, ends, strict=True))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(parts)

        def forward(self, images):
            values, y = {graph.IMAGES: images}, images
            for part, (name, reads, done) in zip(self.parts, plan, strict=True):
                y = part(*[values[read] for read in reads])
                for read in done:
                    del values[read]
                values[name] = y
            return y

    found = Net()
    with torch.no_grad():
        for name, value in learnables(found):
            value.copy_(torch.from_numpy(net.parameters[name]))
    return found


def learnables(module):
    """[("conv1.weight", torch parameter), ...] of what `module` made."""
    from torch.nn.modules.batchnorm import _BatchNorm

    found = []
    for part in module.parts:
        other = {"weight": "gamma", "bias": "beta"} if isinstance(part, _BatchNorm) else {}
        for name, value in part.named_parameters():
            name = name.rpartition(".")[2]
            found.append((f"{part.mpidl_name}.{other.get(name, name)}", value))
    return found


def _part(net, layer, shape, inplace):
    """The torch module of a layer, for images of `shape`."""
    import torch
    from torch import nn

    class Sum(nn.Module):
        def forward(self, *values):
            return sum(values[1:], values[0])

    class Concat(nn.Module):
        def forward(self, *values):
            return torch.cat(values, 1)

    kind = type(layer).__name__
    if kind == "Conv2D":
        return _conv(layer, shape, net.parameters[f"{layer.name}.weight"].shape[2:])
    if kind in ("MaxPool2D", "AveragePool2D"):
        return _pool(layer, shape)
    if kind == "BatchNorm":
        make = nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d
        return make(shape[0], eps=layer.epsilon, momentum=layer.decay)
    if kind == "Dense":
        linear = nn.Linear(net.parameters[f"{layer.name}.weight"].shape[1], layer.outputs)
        return nn.Sequential(nn.Flatten(), linear) if len(shape) > 1 else linear
    if kind == "CrossChannelNorm" and layer.window % 2:  # of even ones PyTorch has others
        return nn.LocalResponseNorm(layer.window, layer.alpha, layer.beta, layer.k)
    makers = {
        "ReLU": lambda: nn.ReLU(inplace=inplace),
        "LeakyReLU": lambda: nn.LeakyReLU(layer.scale),
        "Tanh": nn.Tanh,
        "Sigmoid": nn.Sigmoid,
        "GlobalAveragePool2D": lambda: nn.AdaptiveAvgPool2d(1),
        "Dropout": lambda: nn.Dropout(layer.probability),
        "Flatten": nn.Flatten,
        "Add": Sum,
        "Concat": Concat,
    }
    if kind not in makers:
        raise UserError(f"layer {layer.name}: {kind} has no counterpart in PyTorch here")
    return makers[kind]()


def _conv(layer, shape, size):
    from torch import nn

    stride, dilation = (
        check.pair(layer.name, option, getattr(layer, option), 1)
        for option in ("stride", "dilation")
    )
    pads = check.same_or_pads(layer.name, layer.padding, shape[1:], size, stride, dilation)
    before, padding = _padding(pads, 0.0)
    how = {"stride": stride, "dilation": dilation, "groups": layer.groups, "padding": padding}
    return nn.Sequential(*before, nn.Conv2d(shape[0], layer.filters, size, **how))


def _pool(layer, shape):
    from torch import nn

    size, stride, pads, _ = windows(layer.name, shape, layer.size, layer.stride, layer.padding)
    kind, fill = nn.AvgPool2d, 0.0
    if type(layer).__name__ == "MaxPool2D":
        kind, fill = nn.MaxPool2d, float("-inf")
    half = tuple(n // 2 for n in size)  # more PyTorch's pooling does not take
    before, padding = _padding(pads, fill, half)
    return nn.Sequential(*before, kind(size, stride, padding))


def _padding(pads, fill, most=None):
    """(modules before, what torch's own argument takes): padding that it has no words for becomes
    a module of its own."""
    from torch import nn

    (top, bottom), (left, right) = pads
    fits = most is None or (top <= most[0] and left <= most[1])
    if (top, left) == (bottom, right) and fits:
        return [], (top, left)
    return [nn.ConstantPad2d((left, right, top, bottom), fill)], (0, 0)
