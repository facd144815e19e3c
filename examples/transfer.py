"""Demonstrate transfer learning with the steps of MATLAB's white paper on multiple GPUs.

A network learns the first half of the classes of a data set from many images. With a new last
layer, it then learns the other half from 20 images per class. The default data are the embedded
digits.

    mpirun -n 2 python examples/transfer.py [DATA] [EPOCHS] [EPOCHS OF PRETRAINING] [--picture FILE]

Like the white paper "Deep Learning with MATLAB and Multiple GPUs", the example scales the
mini-batch and the learning rate by the number of ranks, so its weights depend on that number.
"""

import argparse

import numpy as np

import mpidl as dl

PER_CLASS = 20


def halves(images):
    """Return two sets: the images of the first and of the second half of the classes."""
    middle = len(images.classes) // 2
    sets = []
    for first, stop in ((0, middle), (middle, len(images.classes))):
        (indices,) = np.nonzero((images.labels >= first) & (images.labels < stop))
        labels = images.labels[indices] - first
        sets.append(dl.ArrayDatastore(images.read(indices), labels, images.classes[first:stop]))
    return sets


def draw(path, classes, confusions):
    """Draw the accuracy of each class for each network, {title of the network: confusion}."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(ylabel="accuracy")
    for i, (title, confusion) in enumerate(confusions.items()):
        accuracies = confusion.counts.diagonal() / confusion.counts.sum(axis=1)
        axes.bar(np.arange(len(classes)) + 0.4 * i - 0.2, accuracies, width=0.38, label=title)
    axes.set_xticks(range(len(classes)), classes)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path)


def main(data, epochs, pretraining_epochs, picture):
    world, quiet = dl.World(), {"plots": "none", "verbose": "off"}
    images, test = dl.data.open_data(data, world)
    if test is None:
        images, test = images.split(0.9)
    (first_half, images), (_, test) = halves(images), halves(test)
    few, _ = images.split(min(1.0, PER_CLASS / max(np.bincount(images.labels))))

    # Get a pretrained network. The white paper loads AlexNet, for which mpidl has dl.load_model,
    # dl.load_onnx and dl.load_weights.
    pretrained = dl.nn.zoo.digits(images.image_shape, len(first_half.classes))
    options = dl.TrainingOptions.from_recipe("digits", epochs=pretraining_epochs, **quiet)
    dl.train(pretrained, first_half, options, world=world)
    world.report(pretrained_on=", ".join(pretrained.classes), new=", ".join(few.classes))

    # 1. Look at the layers. The last layer has an output for each old class.
    if world.rank == 0:
        print(pretrained)

    # 2. Replace the last layer. The new layer learns 20 times as fast as the other layers.
    net = dl.transfer(pretrained, few.classes, new_layer_factor=20)

    # 3. Scale the mini-batch and the learning rate by the number of workers. The rate drops to a
    #    tenth every 20 epochs.
    schedule = {"learn_rate_schedule": "piecewise", "learn_rate_drop_period": 20}
    schedule |= {"learning_rate": 0.00125, "batch_per_rank": 16, "scale_rate": 16}
    options = dl.TrainingOptions(epochs=epochs, shuffle="every-epoch", **schedule, **quiet)

    # 4. Train and test, for comparison also a network without the pretrained weights.
    confusions = {}
    scratch = dl.nn.zoo.digits(images.image_shape, len(few.classes))
    for title, network in (("with pretraining", net), ("without pretraining", scratch)):
        result = dl.train(network, few, options, world=world)
        evaluation = dl.evaluate(network, test, world=world, confusion=True)
        confusions[title] = evaluation.confusion
        world.report(images=len(few), epochs=result.epochs, loss=result.loss)
        world.report(network=title, accuracy=evaluation.accuracy)
    if world.rank == 0:
        print(confusions["with pretraining"])
    world.report(weights_sha256=dl.weights_sha256(net))
    if picture and world.rank == 0:
        draw(picture, few.classes, confusions)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", nargs="?", default="digits")
    parser.add_argument("epochs", nargs="?", type=int, default=40)
    parser.add_argument("pretraining_epochs", nargs="?", type=int, default=3)
    parser.add_argument("--picture", metavar="FILE", help="draw the results (PNG)")
    main(**vars(parser.parse_args()))
