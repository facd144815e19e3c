"""Search for a learning rate and a mini-batch size: train many models at the same time.

Each rank trains a model, and then takes the next one, until all combinations are done. A model has
the same weights on any number of ranks, so the search always finds the same best model.

    mpirun -n 2 python examples/search.py [EPOCHS] [IMAGES] [--picture FILE]
"""

import argparse
import itertools

import numpy as np

import mpidl as dl

RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)
SIZES = (16, 32, 64, 128)


def draw(path, accuracies):
    """Draw the accuracies (rates, sizes) as a table of colours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="learning rate", ylabel="images per mini-batch")
    axes.imshow(accuracies.T, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(RATES)), RATES)
    axes.set_yticks(range(len(SIZES)), SIZES)
    for (column, row), value in np.ndenumerate(accuracies):
        color = "white" if value > 0.5 else "black"
        axes.text(column, row, f"{value:.3f}", color=color, ha="center", va="center")
    axes.set_title("Accuracy on validation images")
    figure.savefig(path)


def main(epochs, images, picture):
    world = dl.World()
    train, validation, test = dl.data.digits(world).split(images // 10, 50, seed=0)

    def trained(trial, world):  # on each rank of a group
        rate, size = trial
        net = dl.nn.zoo.digits(train.image_shape, len(train.classes), seed=0)
        options = dl.TrainingOptions(
            learning_rate=rate, batch_size=size, epochs=epochs, verbose="off", plots="none"
        )
        dl.train(net, train, options, world=world)
        return dl.evaluate(net, validation, world=world).accuracy, net

    trials = list(itertools.product(RATES, SIZES))
    results = dl.sweep(trained, trials, ranks_per_model=1, world=world)
    for (rate, size), (accuracy, _) in zip(trials, results, strict=True):
        world.report(learning_rate=rate, batch_size=size, validation_accuracy=accuracy)

    # The best model was chosen by the validation images, so other images measure its accuracy.
    accuracies = np.array([accuracy for accuracy, _ in results])
    rate, size = trials[accuracies.argmax()]
    net = results[accuracies.argmax()][1]
    world.report(best_learning_rate=rate, best_batch_size=size)
    world.report(test_accuracy=dl.evaluate(net, test, world=world).accuracy)
    world.report(weights_sha256=dl.weights_sha256(net))
    if picture and world.rank == 0:
        draw(picture, accuracies.reshape(len(RATES), len(SIZES)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("epochs", nargs="?", type=int, default=2)
    parser.add_argument("images", nargs="?", type=int, default=1000)
    parser.add_argument("--picture", metavar="FILE", help="draw the results (PNG)")
    main(**vars(parser.parse_args()))
