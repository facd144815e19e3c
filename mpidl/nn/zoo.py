"""The zoo: networks by name, each with its recipe (the options it was trained with)."""

from mpidl.nn.layers import AveragePool2D, BatchNorm, Conv2D, Dense, MaxPool2D, ReLU
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


def cifar(input_shape=(3, 32, 32), classes=10, seed=0):
    """The network of MATLAB's documents on several GPUs, for images as those of CIFAR-10.

    Four times 3x3 convolution, batch normalization and ReLU with 32 filters, max pooling by 2; the
    same with 64, and with 128 and average pooling by 8; one fully connected layer: 677,610
    learnables for 32x32 colour images of 10 classes. MATLAB counts 43 layers: these 40 and its
    image input, softmax and classification output, which here are the mini-batch queue and the
    loss.

    MATLAB's learning rate is 0.1 for 256 images in a mini-batch and in proportion for others, which
    is for --learning-rate to say. It also drops the rate to a tenth and trains on images shifted by
    up to 4 pixels and mirrored at random; this recipe does neither.
    """
    layers = []
    for filters, pool in ((32, MaxPool2D(2)), (64, MaxPool2D(2)), (128, AveragePool2D(8))):
        for _ in range(4):
            layers += [Conv2D(3, filters, padding=1), BatchNorm(), ReLU()]
        layers.append(pool)
    return Network([*layers, Dense(classes)], input_shape, seed=seed)


NETWORKS = {"digits": digits, "cifar": cifar}

RECIPES = {
    "digits": {
        "epochs": 20,
        "batch_size": 128,
        "learning_rate": 0.01,
        "momentum": 0.9,
        "l2": 0.0,
        "shuffle": "every-epoch",
    },
    "cifar": {
        "epochs": 50,
        "batch_size": 256,
        "learning_rate": 0.1,
        "momentum": 0.9,
        "l2": 1e-10,
        "shuffle": "every-epoch",
    },
}
