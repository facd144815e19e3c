"""Explain predictions: draw the pixels that decide, and check the maps by hiding these pixels.

The script trains a small network and draws maps of four test images by three methods. To check the
maps, it blackens the tenth of the pixels with the largest entries, and measures how far the
probability of the predicted class falls. Random pixels are the comparison. The default data are
Fashion-MNIST if Debian's package dataset-fashion-mnist is installed, else the embedded digits.

    mpirun -n 2 python examples/explain.py [DATA] [EPOCHS] [--picture FILE]
"""

import argparse
import os

import numpy as np

import mpidl as dl

FASHION = "/usr/share/datasets/fashion-mnist"
METHODS = ("grad-cam", "occlusion", "integrated-gradients")


def blackened(images, maps):
    """Return images in which the tenth of the pixels with the largest entries in maps is black."""
    limits = np.quantile(maps, 0.9, axis=(1, 2), keepdims=True)
    return np.where((maps > limits)[:, np.newaxis], 0, images).astype(images.dtype)


def draw(path, images, maps, names):
    """Draw each image, and its maps by all methods: red pixels speak for the class."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    rows = figure.subplots(len(maps) + 1, len(images))
    for column, (image, name) in enumerate(zip(images, names, strict=True)):
        rows[0, column].imshow(image.mean(axis=0), cmap="gray")
        rows[0, column].set_title(f"class {name}", fontsize=9)
        for axes, (method, values) in zip(rows[1:, column], maps.items(), strict=True):
            limit = abs(values[column]).max()
            axes.imshow(values[column], cmap="RdBu_r", vmin=-limit, vmax=limit)
            axes.set_ylabel("" if column else method.replace("-", "\n"), fontsize=9)
    for axes in rows.flat:
        axes.set(xticks=[], yticks=[])
    figure.savefig(path)


def main(data, epochs, picture):
    world = dl.World()
    data = data or (FASHION if os.path.isdir(FASHION) else "digits")
    train, test = dl.data.open_data(data, world)
    if test is None:
        train, test = train.split(0.9, seed=0)
    net = dl.nn.zoo.digits(train.image_shape, len(train.classes), seed=0)
    options = dl.TrainingOptions.from_recipe("digits", epochs=epochs)
    dl.train(net, train, options, world=world)
    world.report(accuracy=dl.evaluate(net, test, world=world).accuracy)

    few = test.subset(np.linspace(0, len(test) - 1, 64).astype(int))
    images = few.read(range(len(few)))
    results = {method: dl.explain(net, few, method=method, world=world) for method in METHODS}
    maps = {method: result.maps for method, result in results.items()}
    random = dl.keyed.uniform(0, "random maps", maps["grad-cam"].size)
    hidden = maps | {"random pixels": random.reshape(maps["grad-cam"].shape)}
    predicted, indices = results["grad-cam"].classes, np.arange(len(few))
    world.report(mean_probability=np.mean(results["grad-cam"].probabilities))
    for name, values in hidden.items():
        scores = dl.predict(net, blackened(images, values), softmax=True, world=world)
        world.report(hidden=name, mean_probability=np.mean(scores[indices, predicted]))
    world.report(weights_sha256=dl.weights_sha256(net))
    if picture and world.rank == 0:
        columns = range(0, 64, 8)
        names = [few.classes[predicted[i]] for i in columns]
        draw(picture, images[columns], {name: m[columns] for name, m in maps.items()}, names)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", nargs="?")
    parser.add_argument("epochs", nargs="?", type=int, default=1)
    parser.add_argument("--picture", metavar="FILE", help="draw the results (PNG)")
    main(**vars(parser.parse_args()))
