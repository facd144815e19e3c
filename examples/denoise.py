"""Train a small network to remove noise from images, with a custom data set that has targets.

The data set is a class with three methods. Each image has noise added, and its target is the image
without noise. The loss is the mean squared error between the network's output and the target.

    mpirun -n 2 python examples/denoise.py [DATA] [ITERATIONS] [--picture FILE]
"""

import argparse

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


def draw(path, rows):
    """Draw images in rows, {title of the row: images (n, C, H, W)}."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    for part, (title, images) in zip(figure.subfigures(len(rows), 1), rows.items(), strict=True):
        part.suptitle(title, fontsize=10)
        for axes, image in zip(part.subplots(1, len(images)), images, strict=True):
            axes.imshow(image.mean(axis=0), cmap="gray", vmin=0, vmax=1)
            axes.set_axis_off()
    figure.savefig(path)


def main(data, iterations, picture):
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
        max_iterations=iterations,
    )
    dl.train(net, train, options, world=world)

    error = dl.regression_errors(net, test, world=world)
    noise = test.read(range(len(test))) - test.targets(range(len(test)))
    world.report(noisy=np.sqrt(np.mean(np.square(noise))), denoised=error.rmse)
    world.report(weights_sha256=dl.weights_sha256(net))

    few = test.subset(range(0, len(test), len(test) // 8)[:8])
    denoised = dl.predict(net, few, world=world)
    if picture and world.rank == 0:
        rows = {"noisy images": few.read(range(8)), "output of the network": denoised}
        draw(picture, rows | {"targets": few.targets(range(8))})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", nargs="?", default="digits")
    parser.add_argument("iterations", nargs="?", type=int, default=400)
    parser.add_argument("--picture", metavar="FILE", help="draw the results (PNG)")
    main(**vars(parser.parse_args()))
