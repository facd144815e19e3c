"""Name all digits in images that show two of them: several labels per image.

An image consists of two of the embedded digits, and its target has a 0 or 1 for each of ten labels.
The network has a probability for each label. About four of five images lack a label, so the loss
gives the positive targets a larger weight.

    mpirun -n 2 python examples/labels.py [EPOCHS] [IMAGES] [--picture FILE]
"""

import argparse

import numpy as np

import mpidl as dl


def pairs(digits, count):
    """Return a set of `count` images, each of two random digits side by side."""
    left = dl.keyed.permutation(len(digits), 0, "left")[:count]
    right = dl.keyed.permutation(len(digits), 0, "right")[:count]
    images = np.concatenate([digits.read(left), digits.read(right)], axis=3)
    labels = np.asarray(digits.labels)
    targets = np.zeros((count, len(digits.classes)), np.uint8)
    for side in (left, right):
        targets[np.arange(count), labels[side]] = 1
    return dl.ArrayDatastore(images, targets=targets, classes=digits.classes)


def draw(path, images, targets, probabilities):
    """Draw images, and the probability of each label; the bars of correct labels are blue."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    parts = figure.subfigures(2, 4).flat
    for part, image, target, heights in zip(parts, images, targets, probabilities, strict=True):
        top, bottom = part.subplots(2, 1)
        top.imshow(image[0], cmap="gray")
        top.set_axis_off()
        colors = np.where(target == 1, "tab:blue", "tab:orange")
        bottom.bar(range(len(target)), heights, color=colors)
        bottom.set(ylim=(0, 1), xticks=range(len(target)), yticks=(0, 0.5, 1))
        bottom.tick_params(labelsize=8)
    figure.savefig(path)


def main(epochs, images, picture):
    world = dl.World()
    train, test = dl.data.digits(world).split(0.9, seed=0)
    train, test = pairs(train, images), pairs(test, 1000)
    layers = []
    for filters in (16, 32, 32):
        layers += [dl.Conv2D(3, filters, padding=1), dl.BatchNorm(), dl.ReLU(), dl.MaxPool2D(2)]
    layers += [dl.Dense(len(train.classes)), dl.Sigmoid()]
    net = dl.Network(layers, train.image_shape, seed=0)
    options = dl.TrainingOptions(
        loss=dl.BinaryCrossEntropy(positive_weights="balanced"),
        epochs=epochs,
        batch_size=64,
        solver="adam",
        learning_rate=0.003,
        learn_rate_schedule="cosine",
    )
    dl.train(net, train, options, world=world)

    probabilities, targets = dl.predict(net, test, world=world), test.targets(range(len(test)))
    is_correct = (probabilities > 0.5) == targets
    missed = np.mean(probabilities[targets == 1] <= 0.5)
    world.report(correct_labels=np.mean(is_correct), missed_labels=missed)
    world.report(images_with_all_labels_correct=np.mean(is_correct.all(axis=1)))
    world.report(weights_sha256=dl.weights_sha256(net))
    if picture and world.rank == 0:
        draw(picture, test.read(range(8)), targets[:8], probabilities[:8])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("epochs", nargs="?", type=int, default=6)
    parser.add_argument("images", nargs="?", type=int, default=6000)
    parser.add_argument("--picture", metavar="FILE", help="draw the results (PNG)")
    main(**vars(parser.parse_args()))
