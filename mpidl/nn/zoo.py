"""The zoo: networks by name, each with its recipe (the options it was trained with)."""

from mpidl.nn.layers import BatchNorm, Conv2D, Dense, ReLU
from mpidl.nn.network import Network


def digits(input_shape=(1, 28, 28), classes=10, seed=0):
    """Three convolutions with batch normalization and one fully connected layer.

    The network of MATLAB's "Train Network in Parallel with Custom Training Loop": 123,090
    learnables for 28x28 gray images of 10 classes.
    """
    layers = [
        Conv2D(5, 20),
        BatchNorm(),
        ReLU(),
        Conv2D(3, 20, padding=1),
        BatchNorm(),
        ReLU(),
        Conv2D(3, 20, padding=1),
        BatchNorm(),
        ReLU(),
        Dense(classes),
    ]
    return Network(layers, input_shape, seed=seed)


NETWORKS = {"digits": digits}

RECIPES = {
    "digits": {
        "epochs": 20,
        "batch_size": 128,
        "learning_rate": 0.01,
        "momentum": 0.9,
        "l2": 0.0,
        "shuffle": "every-epoch",
    },
}
