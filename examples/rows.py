"""Classify digits that LSTM layers read row by row, also from the first rows alone.

mpirun -n 2 python examples/rows.py [EPOCHS] [--picture FILE]
"""

import argparse

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


def draw(path, images, accuracies):
    """Draw the accuracy after each part of the rows, and six images up to this row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.4))
    axes = left.add_subplot(xlabel="rows that the network has read", ylabel="accuracy")
    axes.plot(list(accuracies), list(accuracies.values()), marker="o")
    axes.set(xticks=list(accuracies), ylim=(0, 1.05))
    for axes, rows in zip(right.subplots(len(accuracies), 1), accuracies, strict=True):
        read = images.copy()
        read[:, :, rows:] = 90
        axes.imshow(np.hstack(read[:, 0]), cmap="gray", vmin=0, vmax=255)
        axes.set_title(f"{rows} rows", fontsize=10)
        axes.set_axis_off()
    figure.savefig(path)


def main(epochs, picture):
    world = dl.World()
    images, _ = dl.data.open_data("digits", world)
    train, test = images.split(0.9, seed=0)
    net = recurrent_network(train.image_shape, len(train.classes))
    options = dl.TrainingOptions(
        epochs=epochs,
        solver="adam",
        learning_rate=0.005,
        learn_rate_schedule="cosine",
        gradient_threshold=1.0,
    )
    dl.train(net, train, options, world=world)
    world.report(accuracy=dl.evaluate(net, test, world=world).accuracy)
    queue = dl.MinibatchQueue(test, batch_size=128, world=world)
    counts = sum(correct_after_rows(net, *minibatch) for minibatch in queue.epoch(0))
    accuracies = dict(zip((7, 14, 21, 28), world.gop("sum", counts) / len(test), strict=True))
    for rows, accuracy in accuracies.items():
        world.report(rows=rows, accuracy=accuracy)
    world.report(weights_sha256=dl.weights_sha256(net))
    if picture and world.rank == 0:
        draw(picture, test.read(range(0, len(test), 170)), accuracies)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("epochs", nargs="?", type=int, default=6)
    parser.add_argument("--picture", metavar="FILE", help="draw the results (PNG)")
    main(**vars(parser.parse_args()))
