"""Define a custom op with a weight, and a loss with tied and normalized weights and a penalty.

The code works on plain arrays, one block of at most 16 images at a time. The printed hash is the
same on any number of ranks.

    mpirun -n 3 python examples/custom_op.py [FOLDER OF IMAGES] [ITERATIONS]
"""

import hashlib
import itertools
import sys

import numpy as np

import mpidl as dl


@dl.op
def swish(x, slope):
    """Return y = x * sigmoid(slope * x). x, y: (n, C, H, W); slope per channel: (C,)."""
    s = slope[:, None, None]
    gate = 1 / (1 + np.exp(-s * x))

    def vjp(dy):  # one cotangent for each argument
        d = dy * x * gate * (1 - gate)
        return dy * gate + s * d, (x * d).sum(axis=(0, 2, 3))

    return x * gate, vjp


def model_loss(w, images, labels):
    # Weight normalization: the length of a filter is learned separately from its direction.
    direction = w["conv.direction"]
    norm = dl.sqrt(dl.total(direction**2, axis=(1, 2, 3)))
    filters = direction * dl.reshape(w["conv.length"] / norm, (8, 1, 1, 1))
    x = swish(dl.conv2d(images, filters, w["conv.bias"], stride=2), w["swish.slope"])
    # Tied weights: the decoder is the transpose of the encoder.
    x = dl.conv2d(x, w["mix.weight"], w["mix.bias"])
    x = dl.conv2d(x, dl.transpose(w["mix.weight"], (1, 0, 2, 3)), w["conv.bias"])
    scores = dl.dense(dl.flatten(x), w["dense.weight"], w["dense.bias"])
    penalty = 0.001 * dl.total(w["dense.weight"] ** 2)  # counted once, on any number of ranks
    return dl.softmax_cross_entropy(scores, labels) + penalty


def initial(image_shape, classes):
    """Return the initial learnables {name: float32 array}: random numbers, keyed by name."""
    c, h, width = image_shape
    features = 8 * ((h - 5) // 2 + 1) * ((width - 5) // 2 + 1)
    shapes = {
        "conv.direction": (8, c, 5, 5),
        "mix.weight": (4, 8, 1, 1),
        "dense.weight": (classes, features),
    }
    constant = {"conv.length": (8, 1), "conv.bias": (8, 0), "mix.bias": (4, 0)}
    constant |= {"swish.slope": (8, 1), "dense.bias": (classes, 0)}
    found = {name: np.full(n, value, np.float32) for name, (n, value) in constant.items()}
    for name, shape in shapes.items():
        drawn = dl.keyed.uniform(0, name, int(np.prod(shape))).reshape(shape) - 0.5
        found[name] = (drawn * np.sqrt(12 / np.prod(shape[1:]))).astype(np.float32)
    return found


def main(data="digits", iterations=40):
    world = dl.World()
    train, _ = dl.data.open_data(data, world)
    w = initial(train.image_shape, len(train.classes))
    queue = dl.MinibatchQueue(train, batch_size=100, seed=0, world=world)
    sgdm = dl.SGDM(learning_rate=0.05)
    step = dl.value_and_grad(model_loss, reduce=world)
    epochs = itertools.chain.from_iterable(map(queue.epoch, itertools.count(1)))

    for i, (images, labels) in enumerate(itertools.islice(epochs, int(iterations))):
        if i == 0:  # <v, J d> = <vjp(v), d> along a random direction, in float64
            x = images.like(images.lanes.astype(np.float64))
            difference = dl.check_vjp(swish, x, np.linspace(0.5, 2, x.shape[1]))
            world.report(check_vjp=f"{difference:.1e}")
        loss, gradients = step(w, images, labels)
        w = sgdm(w, gradients)
        if i % 10 == 0:
            world.report(iteration=i + 1, loss=loss)

    digest = hashlib.sha256(b"".join(w[name].tobytes() for name in sorted(w)))
    world.report(weights_sha256=digest.hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
