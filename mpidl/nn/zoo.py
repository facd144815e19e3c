"""The zoo: networks by name, each with its recipe (the options it was trained with)."""

from mpidl.nn.layers import (
    Add,
    AveragePool2D,
    BatchNorm,
    Conv2D,
    CrossChannelNorm,
    Dense,
    Dropout,
    GlobalAveragePool2D,
    Layer,
    MaxPool2D,
    ReLU,
)
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

    The recipe is that of the documents: images are mirrored at random and moved by up to 4 pixels.
    """
    layers = []
    for filters, pool in ((32, MaxPool2D(2)), (64, MaxPool2D(2)), (128, AveragePool2D(8))):
        for _ in range(4):
            layers += [Conv2D(3, filters, padding=1), BatchNorm(), ReLU()]
        layers.append(pool)
    return Network([*layers, Dense(classes)], input_shape, seed=seed)


def resnet(input_shape=(3, 32, 32), classes=10, seed=0):
    """The residual network of 20 layers for small images: 273,258 learnables for 32x32 colour
    images of 10 classes.

    He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2016, section 4.2: a
    3x3 convolution; three stages of three blocks of two 3x3 convolutions, with 16, 32 and 64
    filters, the second and third stage at half the rows and columns; the mean of each channel; one
    fully connected layer. Where a block changes the shape, a 1x1 convolution with batch
    normalization brings its input into the new one (the paper's option B). Convolutions have
    biases, and weights are Glorot uniform. The recipe is that of MATLAB's "Train Residual Network
    for Image Classification": images are mirrored at random and moved by up to 4 pixels.
    """
    layers: list[Layer] = [
        Conv2D(3, 16, padding=1, name="conv1"),
        BatchNorm(name="norm1"),
        ReLU(name="relu1"),
    ]
    block, before, filters = 0, "relu1", 16
    for stage in range(3):
        for _ in range(3):
            block += 1
            own, wanted = f"block{block}", 16 << stage
            stride, shortcut = (1, before) if wanted == filters else (2, f"{own}_shortcut_norm")
            layers += [
                Conv2D(3, wanted, stride=stride, padding=1, name=f"{own}_conv1"),
                BatchNorm(name=f"{own}_norm1"),
                ReLU(name=f"{own}_relu1"),
                Conv2D(3, wanted, padding=1, name=f"{own}_conv2"),
                BatchNorm(name=f"{own}_norm2"),
            ]
            if wanted != filters:
                projection = f"{own}_shortcut"
                layers += [
                    Conv2D(1, wanted, stride=stride, name=projection, after=before),
                    BatchNorm(name=shortcut),
                ]
            before, filters = f"{own}_relu2", wanted
            layers += [
                Add(inputs=(f"{own}_norm2", shortcut), name=f"{own}_add"),
                ReLU(name=before),
            ]
    layers += [GlobalAveragePool2D(name="pool"), Dense(classes, name="dense1")]
    return Network(layers, input_shape, seed=seed)


def alexnet(input_shape=(3, 227, 227), classes=1000, seed=0):
    """The network of Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep
    convolutional neural networks", 2012: 60,965,224 learnables for 227x227 colour images of 1000
    classes.

    Five convolutions, the second, fourth and fifth in two groups; cross-channel normalization
    behind the first two and overlapping max pooling behind the first two and the last; three fully
    connected layers with dropout between them. Layers have the names that MATLAB's and Caffe's
    model have, and the normalization's constant is theirs, 1 (the paper's: 2); weights are Glorot
    uniform and biases zero. The recipe is that of MATLAB's "Deep Learning with MATLAB and Multiple
    GPUs" for a pretrained AlexNet; its learning rate is low for a new one.
    """
    layers = [
        Conv2D(11, 96, stride=4, name="conv1"),
        ReLU(name="relu1"),
        CrossChannelNorm(5, k=1.0, name="norm1"),
        MaxPool2D(3, stride=2, name="pool1"),
        Conv2D(5, 256, padding=2, groups=2, name="conv2"),
        ReLU(name="relu2"),
        CrossChannelNorm(5, k=1.0, name="norm2"),
        MaxPool2D(3, stride=2, name="pool2"),
        Conv2D(3, 384, padding=1, name="conv3"),
        ReLU(name="relu3"),
        Conv2D(3, 384, padding=1, groups=2, name="conv4"),
        ReLU(name="relu4"),
        Conv2D(3, 256, padding=1, groups=2, name="conv5"),
        ReLU(name="relu5"),
        MaxPool2D(3, stride=2, name="pool5"),
        Dense(4096, name="fc6"),
        ReLU(name="relu6"),
        Dropout(0.5, name="drop6"),
        Dense(4096, name="fc7"),
        ReLU(name="relu7"),
        Dropout(0.5, name="drop7"),
        Dense(classes, name="fc8"),
    ]
    return Network(layers, input_shape, seed=seed)


NETWORKS = {"digits": digits, "cifar": cifar, "resnet": resnet, "alexnet": alexnet}

RECIPES = {
    "digits": {
        "epochs": 20,
        "batch_size": 128,
        "learning_rate": 0.01,
        "momentum": 0.9,
        "l2": 0.0,
        "shuffle": "every-epoch",
        "batchnorm_statistics": "moving",
    },
    "cifar": {
        "epochs": 50,
        "batch_size": 256,
        "learning_rate": 0.1,
        "scale_rate": 256,
        "learn_rate_schedule": "piecewise",
        "learn_rate_drop_factor": 0.1,
        "learn_rate_drop_period": 45,
        "momentum": 0.9,
        "l2": 1e-10,
        "shuffle": "every-epoch",
        "flip": "x",
        "translate": 4,
        "validation_frequency": 0,
    },
    "resnet": {
        "epochs": 80,
        "batch_size": 128,
        "learning_rate": 0.1,
        "scale_rate": 128,
        "learn_rate_schedule": "piecewise",
        "learn_rate_drop_factor": 0.1,
        "learn_rate_drop_period": 60,
        "momentum": 0.9,
        "l2": 1e-4,
        "shuffle": "every-epoch",
        "flip": "x",
        "translate": 4,
        "validation_frequency": 0,
    },
    "alexnet": {
        "epochs": 30,
        "batch_size": 250,
        "learning_rate": 0.00125,
        "scale_rate": 250,
        "learn_rate_schedule": "piecewise",
        "learn_rate_drop_factor": 0.1,
        "learn_rate_drop_period": 20,
        "momentum": 0.9,
        "l2": 1e-4,
        "shuffle": "every-epoch",
    },
}
