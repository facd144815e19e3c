"""Predict the angle by which a digit is rotated, with a network that outputs one number.

The embedded digits are rotated by -30 to 30 degrees. The network comes from MATLAB's example "Train
Convolutional Neural Network for Regression". The script reports the errors on 1,000 other digits:
the root mean square error, the mean absolute error, and the fraction of angles that are correct
within 10 degrees.

    mpirun -n 2 python examples/angle.py [EPOCHS]
"""

import sys

import numpy as np

import mpidl as dl


def main(epochs=6):
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
        epochs=int(epochs),
        batch_size=64,
        solver="adam",
        learning_rate=0.003,
        learn_rate_schedule="cosine",
        shuffle="every-epoch",
    )
    dl.train(net, train, options, world=world)

    error = dl.regression_errors(net, test, world=world)
    angles = dl.predict(net, test, world=world)[:, 0]
    close = np.mean(abs(angles - test.targets(range(len(test)))) < 10)
    world.report(rmse=error.rmse, mae=error.mae, within_10_degrees=close)
    world.report(weights_sha256=dl.weights_sha256(net))


if __name__ == "__main__":
    main(*sys.argv[1:])
