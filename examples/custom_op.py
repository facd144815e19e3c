"""Define a custom op with a weight, and a loss with tied and normalized weights and a penalty.

The code works on plain arrays, one block of at most 16 images at a time. The printed hash is the
same on any number of ranks.

    mpirun -n 2 python examples/custom_op.py [DATA] [ITERATIONS] [--picture FILE]
"""

import argparse
import hashlib
import itertools

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
    shapes = {"conv.direction": (8, c, 5, 5), "mix.weight": (4, 8, 1, 1)}
    shapes["dense.weight"] = (classes, 8 * ((h - 5) // 2 + 1) * ((width - 5) // 2 + 1))
    w = {"conv.length": np.ones(8), "conv.bias": np.zeros(8), "mix.bias": np.zeros(4)}
    w |= {"swish.slope": np.ones(8), "dense.bias": np.zeros(classes)}
    for name, shape in shapes.items():
        numbers = dl.keyed.uniform(0, name, int(np.prod(shape))).reshape(shape) - 0.5
        w[name] = numbers * np.sqrt(12 / np.prod(shape[1:]))
    return {name: array.astype(np.float32) for name, array in w.items()}


def draw(path, slopes):
    """Draw the learned activation function of each channel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(title="swish in each channel (dashed: before training)")
    x = np.linspace(-6, 2, 200)
    for slope in slopes:
        axes.plot(x, x / (1 + np.exp(-slope * x)))
    axes.plot(x, x / (1 + np.exp(-x)), "k--")
    figure.savefig(path)


def main(data, iterations, picture):
    world = dl.World()
    train, _ = dl.data.open_data(data, world)
    w = initial(train.image_shape, len(train.classes))
    queue = dl.MinibatchQueue(train, batch_size=100, seed=0, world=world)
    sgdm = dl.SGDM(learning_rate=0.05)
    step = dl.value_and_grad(model_loss, reduce=world)
    epochs = itertools.chain.from_iterable(map(queue.epoch, itertools.count(1)))
    for i, (images, labels) in enumerate(itertools.islice(epochs, iterations)):
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
    if picture and world.rank == 0:
        draw(picture, w["swish.slope"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", nargs="?", default="digits")
    parser.add_argument("iterations", nargs="?", type=int, default=40)
    parser.add_argument("--picture", metavar="FILE", help="draw the results (PNG)")
    main(**vars(parser.parse_args()))
