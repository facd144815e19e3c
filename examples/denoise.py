"""Train a small network to remove noise from images, with a custom data set that has targets.

The data set is a class with three methods. Each image has noise added, and its target is the image
without noise. The loss is the mean squared error between the network's output and the target.

    mpirun -n 4 python examples/denoise.py [FOLDER OF IMAGES] [ITERATIONS]
"""

import sys

import numpy as np

import mpidl as dl


class Noisy(dl.data.Datastore):
    """Images with noise. The target of an image is the image without noise."""

    dtype = np.dtype(np.float32)  # the type that `read` returns

    def __init__(self, images, strength=0.2, seed=0):
        self.images, self.strength, self.seed = images, strength, seed
        self.image_shape = self.targets_shape = images.image_shape

    def __len__(self):
        return len(self.images)

    def read(self, indices):
        found = self.targets(indices)
        for image, i in zip(found, indices, strict=True):
            # The index is the key, so an image has the same noise on every rank and in every epoch.
            numbers = dl.keyed.uniform(self.seed, "noise", image.size, sample=int(i))
            image += self.strength * (2 * numbers.reshape(image.shape) - 1)
        return found

    def targets(self, indices):
        return self.images.read(indices) / np.float32(255)


def main(data="digits", iterations=400):
    world = dl.World()
    images, _ = dl.data.open_data(data, world)
    train, test = Noisy(images).split(0.9, seed=0)
    channels = train.image_shape[0]
    layers = [dl.Conv2D(3, 16, padding=1), dl.ReLU()]
    layers += [dl.Conv2D(3, 16, padding=1), dl.ReLU()]
    layers += [dl.Conv2D(3, channels, padding=1)]
    net = dl.Network(layers, train.image_shape, seed=0)
    options = dl.TrainingOptions(
        loss="mse",
        solver="adam",
        learning_rate=0.005,
        batch_size=64,
        shuffle="every-epoch",
        max_iterations=int(iterations),
    )
    dl.train(net, train, options, world=world)

    error = dl.regression_errors(net, test, world=world)
    noise = test.read(range(len(test))) - test.targets(range(len(test)))
    world.report(noisy=np.sqrt(np.mean(np.square(noise))), denoised=error.rmse)
    world.report(weights_sha256=dl.weights_sha256(net))


if __name__ == "__main__":
    main(*sys.argv[1:])
