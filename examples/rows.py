"""Classify digits that LSTM layers read row by row, also from the first rows alone.

mpirun -n 2 python examples/rows.py [EPOCHS]
"""

import sys

import numpy as np

import mpidl as dl


def recurrent_network(shape, classes):
    """Return a network that reads each row of an image as a step of a sequence."""
    layers = [dl.LSTM(64), dl.LSTM(64, returns="last"), dl.Dense(classes)]
    return dl.Network(layers, shape, seed=0)


def learnables(net, name):
    return (net.parameters[f"{name}.{part}"] for part in ("weight", "recurrent_weight", "bias"))


def correct_after_rows(net, images, labels, parts=4):
    """Return how many images of this rank are classified correctly after each part of the rows.

    The state of an image, which stays on its rank, continues from part to part.
    """
    counts, first, second = [], None, None
    for rows in np.split(images.local(), parts, axis=2):
        y = dl.from_images(rows, images.batch)
        y, first = dl.lstm(y, *learnables(net, "lstm1"), state=first)
        y, second = dl.lstm(y, *learnables(net, "lstm2"), state=second, returns="last")
        scores = dl.dense(y, net.parameters["dense1.weight"], net.parameters["dense1.bias"])
        counts.append(int((scores.local().argmax(axis=1) == labels.local()).sum()))
    return np.array(counts)


def main(epochs=6):
    world = dl.World()
    images, _ = dl.data.open_data("digits", world)
    train, test = images.split(0.9, seed=0)
    net = recurrent_network(train.image_shape, len(train.classes))
    options = dl.TrainingOptions(
        epochs=int(epochs),
        solver="adam",
        learning_rate=0.005,
        learn_rate_schedule="cosine",
        gradient_threshold=1.0,
    )
    dl.train(net, train, options, world=world)
    world.report(accuracy=dl.evaluate(net, test, world=world).accuracy)
    queue = dl.MinibatchQueue(test, batch_size=128, world=world)
    counts = sum(correct_after_rows(net, *minibatch) for minibatch in queue.epoch(0))
    for part, count in enumerate(world.gop("sum", counts)):
        world.report(rows=7 * part + 7, accuracy=count / len(test))
    world.report(weights_sha256=dl.weights_sha256(net))


if __name__ == "__main__":
    main(*sys.argv[1:])
