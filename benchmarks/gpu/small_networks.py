"""Define small networks for `run/gpu-check --small` and for compute-sanitizer."""

import mpidl as dl


def plain(input_shape, classes):
    """Return a small network of convolutions without branches, in the form of `zoo.digits`."""
    return [
        *(dl.Conv2D(3, 8), dl.BatchNorm(), dl.ReLU()),
        *(dl.Conv2D(3, 8, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Dense(classes)),
    ]


def residual(input_shape, classes):
    """Return a small network with branches and every kind of layer that the zoo uses."""
    return [
        *(dl.Conv2D(3, 8, stride=2, padding=1, bias=False), dl.BatchNorm(), dl.ReLU(name="stem")),
        *(dl.Conv2D(3, 8, padding="same", bias=False), dl.BatchNorm(), dl.ReLU()),
        *(dl.Conv2D(3, 8, padding="same", groups=8, bias=False), dl.BatchNorm(name="branch")),
        *(dl.Add(inputs=("branch", "stem")), dl.ReLU(name="sum")),
        *(dl.CrossChannelNorm(5), dl.MaxPool2D(3, stride=1, padding=1, name="pool")),
        *(dl.TransposedConv2D(2, 8, stride=2), dl.AveragePool2D(2, name="wide")),
        *(dl.Concat(inputs=("pool", "wide")), dl.Pad2D(1), dl.Conv2D(1, 8), dl.PReLU()),
        *(dl.Dropout(0.2), dl.GlobalAveragePool2D(), dl.Dense(classes)),
    ]


def shortcut(input_shape, classes):
    """Return a small residual network of layers that the benchmarks convert to PyTorch."""
    return [
        *(dl.Conv2D(3, 8, stride=2, padding=1, bias=False), dl.BatchNorm(), dl.ReLU(name="stem")),
        *(dl.Conv2D(3, 8, padding=1, bias=False), dl.BatchNorm(name="branch")),
        *(dl.Add(inputs=("branch", "stem")), dl.ReLU(), dl.GlobalAveragePool2D()),
        dl.Dense(classes),
    ]
