"""Inception v3, with torchvision's shapes and layer names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mpidl import nn
from mpidl.nn.zoo.sections import builds_network
from mpidl.nn.zoo.torchvision.recipe import RECIPE

SHAPE = (3, 299, 299)
Size: TypeAlias = "int | tuple[int, int]"
PADDED, UNPADDED = True, False  # whether a convolution is padded, so that it keeps rows and columns
ROW, COLUMN = (1, 7), (7, 1)

# (name, size, filters, stride, padded) of each convolution before the first module; None: pooling
STEM = (
    ("Conv2d_1a_3x3", 3, 32, 2, UNPADDED),
    ("Conv2d_2a_3x3", 3, 32, 1, UNPADDED),
    ("Conv2d_2b_3x3", 3, 64, 1, PADDED),
    None,
    ("Conv2d_3b_1x1", 1, 80, 1, UNPADDED),
    ("Conv2d_4a_3x3", 3, 192, 1, UNPADDED),
    None,
)


class _Module:
    """The layers of an Inception module: branches that all read the layer `before`."""

    def __init__(self, name: str, before: str) -> None:
        self.name, self.before = name, before
        self.layers: list[nn.Layer] = []
        self.outputs: list[str] = []

    def convolve(
        self, branch: str, size: Size, filters: int, *, stride: int = 1, after: str = ""
    ) -> str:
        """Append a convolution, batch normalization and ReLU, and return the name of the last one.

        They read the layer `after`, by default the input of the module. A convolution without
        stride is padded.
        """
        name = f"{self.name}_{branch}"
        self.layers += _convolution(name, size, filters, stride, stride == 1, after or self.before)
        return f"{name}_relu"

    def chain(self, branch: str, *parts: tuple[Size, int], stride: int = 1) -> str:
        """Append convolutions named BRANCH_1, BRANCH_2, ...; only the last one has the stride."""
        output = ""
        for i, (size, filters) in enumerate(parts, 1):
            step = stride if i == len(parts) else 1
            output = self.convolve(f"{branch}_{i}", size, filters, stride=step, after=output)
        return output

    def fork(self, branch: str, filters: int, after: str) -> list[str]:
        """Append a 1x3 and a 3x1 convolution of the layer `after`, and return their outputs."""
        return [
            self.convolve(f"{branch}a", (1, 3), filters, after=after),
            self.convolve(f"{branch}b", (3, 1), filters, after=after),
        ]

    def pool(self, filters: int) -> str:
        """Append average pooling, and a 1x1 convolution of its result."""
        pooling = nn.AveragePool2D(3, stride=1, padding=1, name=f"{self.name}_pool")
        pooling.after = self.before
        self.layers.append(pooling)
        return self.convolve("branch_pool", 1, filters, after=f"{self.name}_pool")

    def shrink(self) -> str:
        """Append max pooling with stride 2."""
        pooling = nn.MaxPool2D(3, stride=2, name=f"{self.name}_pool")
        pooling.after = self.before
        self.layers.append(pooling)
        return f"{self.name}_pool"

    def joined(self, *outputs: str) -> list[nn.Layer]:
        """Return the layers of the module, which ends with the concatenation of `outputs`."""
        return [*self.layers, nn.Concat(inputs=outputs, name=self.name)]


def _convolution(
    name: str, size: Size, filters: int, stride: int, is_padded: bool, after: str | None = None
) -> list[nn.Layer]:
    rows, columns = (size, size) if isinstance(size, int) else size
    padding = (rows // 2, columns // 2) if is_padded else 0
    conv = nn.Conv2D(size, filters, stride=stride, padding=padding, bias=False, name=f"{name}_conv")
    conv.after = after
    return [conv, nn.BatchNorm(epsilon=0.001, name=f"{name}_bn"), nn.ReLU(name=f"{name}_relu")]


def _module_a(name: str, before: str, pooled: int) -> list[nn.Layer]:
    m = _Module(name, before)
    return m.joined(
        m.convolve("branch1x1", 1, 64),
        m.chain("branch5x5", (1, 48), (5, 64)),
        m.chain("branch3x3dbl", (1, 64), (3, 96), (3, 96)),
        m.pool(pooled),
    )


def _module_b(name: str, before: str) -> list[nn.Layer]:
    m = _Module(name, before)
    return m.joined(
        m.convolve("branch3x3", 3, 384, stride=2),
        m.chain("branch3x3dbl", (1, 64), (3, 96), (3, 96), stride=2),
        m.shrink(),
    )


def _module_c(name: str, before: str, filters: int) -> list[nn.Layer]:
    m, n = _Module(name, before), filters
    return m.joined(
        m.convolve("branch1x1", 1, 192),
        m.chain("branch7x7", (1, n), (ROW, n), (COLUMN, 192)),
        m.chain("branch7x7dbl", (1, n), (COLUMN, n), (ROW, n), (COLUMN, n), (ROW, 192)),
        m.pool(192),
    )


def _module_d(name: str, before: str) -> list[nn.Layer]:
    m = _Module(name, before)
    return m.joined(
        m.chain("branch3x3", (1, 192), (3, 320), stride=2),
        m.chain("branch7x7x3", (1, 192), (ROW, 192), (COLUMN, 192), (3, 192), stride=2),
        m.shrink(),
    )


def _module_e(name: str, before: str) -> list[nn.Layer]:
    m = _Module(name, before)
    return m.joined(
        m.convolve("branch1x1", 1, 320),
        *m.fork("branch3x3_2", 384, m.convolve("branch3x3_1", 1, 384)),
        *m.fork("branch3x3dbl_3", 384, m.chain("branch3x3dbl", (1, 448), (3, 384))),
        m.pool(192),
    )


@builds_network
def inception_v3(
    input_shape: Sequence[int] = SHAPE, classes: int = 1000, seed: int = 0
) -> nn.Network:
    """Return Inception v3, with 23,834,568 learnables for 1000 classes.

    Five convolutions are followed by eleven modules. A module concatenates branches of convolutions
    with filters of different sizes. As in torchvision, the 5x5 convolutions of the paper remain.
    The auxiliary classifier, which torchvision's network has in training, is left out.

    Notes
    -----
    See Szegedy, Vanhoucke, Ioffe, Shlens and Wojna, "Rethinking the Inception architecture for
    computer vision", 2016, table 1.
    """
    layers: list[nn.Layer] = []
    for i, part in enumerate(STEM):
        if part is None:
            layers.append(nn.MaxPool2D(3, stride=2, name=f"maxpool{1 + i // 4}"))
        else:
            layers += _convolution(*part)
    modules: tuple[tuple[Callable[..., list[nn.Layer]], str, tuple[int, ...]], ...] = (
        (_module_a, "Mixed_5b", (32,)),
        (_module_a, "Mixed_5c", (64,)),
        (_module_a, "Mixed_5d", (64,)),
        (_module_b, "Mixed_6a", ()),
        (_module_c, "Mixed_6b", (128,)),
        (_module_c, "Mixed_6c", (160,)),
        (_module_c, "Mixed_6d", (160,)),
        (_module_c, "Mixed_6e", (192,)),
        (_module_d, "Mixed_7a", ()),
        (_module_e, "Mixed_7b", ()),
        (_module_e, "Mixed_7c", ()),
    )
    for create, name, numbers in modules:
        layers += create(name, str(layers[-1].name), *numbers)
    layers += [
        nn.GlobalAveragePool2D(name="avgpool"),
        nn.Dropout(name="dropout"),
        nn.Dense(classes, name="fc"),
    ]
    return nn.Network(layers, input_shape, seed=seed)


NETWORKS: dict[str, Callable[..., nn.Network]] = {"inception_v3": inception_v3}
RECIPES: dict[str, dict[str, Any]] = {"inception_v3": RECIPE | {"learning_rate": 0.1}}
