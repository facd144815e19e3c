"""Predict the angle by which a digit is rotated, with a network that outputs one number.

The embedded digits are rotated by -30 to 30 degrees. The network comes from MATLAB's example "Train
Convolutional Neural Network for Regression". The script reports the errors on 1,000 other digits:
the root mean square error, the mean absolute error, and the fraction of angles that are correct
within 10 degrees.

    mpirun -n 2 python examples/angle.py [EPOCHS] [--picture FILE]
"""

import argparse

import numpy as np

import mpidl as dl


def draw(path, images, true, predicted):
    """Draw the predicted against the true angles, and some digits with their predicted angles."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.1, 1))
    axes = left.add_subplot(xlabel="true angle (degrees)", ylabel="predicted angle (degrees)")
    axes.axline((0, 0), slope=1, color="gray", linewidth=1)
    axes.scatter(true, predicted, s=5)
    axes.set_aspect("equal")
    for axes, image, angle in zip(right.subplots(3, 3).flat, images, predicted, strict=False):
        axes.imshow(image[0], cmap="gray")
        axes.set_title(f"{angle:.0f}°", fontsize=10)
        axes.set_axis_off()
    figure.savefig(path)


def main(epochs, picture):
    world = dl.World()
    digits = dl.data.combined(dl.data.digits(world), dl.data.digit_angles())
    train, test = digits.split(0.9, seed=0)
    layers = []
    for filters, pool in ((8, True), (16, True), (32, False), (32, False)):
        layers += [dl.Conv2D(3, filters, padding=1), dl.BatchNorm(), dl.ReLU()]
        layers += [dl.AveragePool2D(2)] * pool
    layers += [dl.Dropout(0.2), dl.Dense(1)]
    net = dl.Network(layers, train.image_shape, seed=0)
    options = dl.TrainingOptions(
        loss="mse",
        epochs=epochs,
        batch_size=64,
        solver="adam",
        learning_rate=0.003,
        learn_rate_schedule="cosine",
        shuffle="every-epoch",
    )
    dl.train(net, train, options, world=world)

    error = dl.regression_errors(net, test, world=world)
    angles = dl.predict(net, test, world=world)[:, 0]
    true = test.targets(range(len(test)))
    close = np.mean(abs(angles - true) < 10)
    world.report(rmse=error.rmse, mae=error.mae, within_10_degrees=close)
    world.report(weights_sha256=dl.weights_sha256(net))
    if picture and world.rank == 0:
        draw(picture, test.read(range(0, len(test), len(test) // 9)), true, angles)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("epochs", nargs="?", type=int, default=6)
    parser.add_argument("--picture", metavar="FILE", help="draw the results (PNG)")
    main(**vars(parser.parse_args()))
