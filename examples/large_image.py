"""Find cells in large images: train a U-Net on windows, and predict overlapping tiles.

Each large image has 320 x 512 pixels and consists of 40 images of the embedded set of cells. The
network trains on windows of 64 x 64 pixels at random positions. For a large test image, the ranks
share its tiles, and rank 0 blends the scores. The result is compared with the true class of each
pixel, and with the result for the image in one piece.

    mpirun -n 2 python examples/large_image.py [EPOCHS] [WINDOWS PER EPOCH] [--picture FILE]
"""

import argparse

import numpy as np

import mpidl as dl

COUNT, ROWS = 40, 5  # small images in a large image
WINDOW, TILE, OVERLAP = 64, 128, 64  # pixels


def large_images(cells, count):
    """Return `count` images (count, 320, 512) and the class of each pixel, of the same shape."""
    indices = range(count * COUNT)
    grid = (count, ROWS, COUNT // ROWS, *cells.targets_shape)
    return [
        small.reshape(grid).transpose(0, 1, 3, 2, 4).reshape(count, ROWS * grid[3], -1)
        for small in (cells.read(indices), cells.targets(indices))
    ]


def draw(path, image, predicted):
    """Draw a part of the image with the outlines of the predicted cells, and two of the tiles."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(8, 4.5))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(image, cmap="gray", aspect="auto", interpolation="nearest")
    axes.contour(predicted, [0.5], colors="tab:orange", linewidths=1)
    for left in (64, 64 + TILE - OVERLAP):
        tile = Rectangle((left, 64), TILE, TILE, fill=False, edgecolor="cyan", linewidth=2)
        axes.add_patch(tile)
    axes.set(xlim=(0, 400), ylim=(225, 0))
    axes.set_axis_off()
    figure.savefig(path)


def main(epochs, windows, picture):
    world = dl.World()
    images, masks = large_images(dl.data.cells("train"), 10)
    train = dl.ArrayDatastore(images, targets=masks, classes=["background", "cell"])
    # An epoch uses one window of each image, so each image is repeated.
    repeated = train.subset(np.arange(windows) % len(train))
    net = dl.nn.zoo.unet((1, WINDOW, WINDOW), len(train.classes), depth=2, filters=8, seed=0)
    options = dl.TrainingOptions.from_recipe(
        "unet", epochs=epochs, learning_rate=0.005, random_crop=(WINDOW, WINDOW)
    )
    dl.train(net, repeated, options, world=world)

    image, true = large_images(dl.data.cells("test"), 1)
    predicted = dl.classify(net, image, tile=TILE, overlap=OVERLAP, world=world)
    in_one_piece = dl.classify(net, image, tile=max(image.shape), world=world)
    iou = np.sum((predicted == 1) & (true == 1)) / np.sum((predicted == 1) | (true == 1))
    world.report(accuracy=np.mean(predicted == true), iou_cell=iou)
    world.report(same_class_as_in_one_piece=np.mean(predicted == in_one_piece))
    world.report(weights_sha256=dl.weights_sha256(net))
    if picture and world.rank == 0:
        draw(picture, image[0], predicted[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("epochs", nargs="?", type=int, default=6)
    parser.add_argument("windows", nargs="?", type=int, default=400)
    parser.add_argument("--picture", metavar="FILE", help="draw the results (PNG)")
    main(**vars(parser.parse_args()))
