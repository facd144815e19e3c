"""Find cells in images: train a U-Net on the embedded set, and measure the intersection over union.

The set has 800 training images and 200 test images. Each image shows 4 to 12 cells with noise. Its
target is the class of each pixel: 1 in a cell, else 0. Images and masks are mirrored together.

    mpirun -n 2 python examples/cells.py [EPOCHS] [IMAGES] [--picture FILE]
"""

import argparse

import mpidl as dl


def draw(path, images, true, predicted):
    """Draw four images, and below each one its predicted cells and the true outlines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    for i, (top, bottom) in enumerate(zip(*figure.subplots(2, 4), strict=True)):
        top.imshow(images[i, 0], cmap="gray")
        bottom.imshow(predicted[i], cmap="Blues", vmax=1.5)
        bottom.contour(true[i], [0.5], colors="tab:orange")
        for axes in (top, bottom):
            axes.set(xticks=[], yticks=[])
    figure.supxlabel("blue: predicted cells, orange: true outlines", fontsize=10)
    figure.savefig(path)


def main(epochs, images, picture):
    world = dl.World()
    train, test = dl.data.cells("train").subset(range(images)), dl.data.cells("test")
    net = dl.nn.zoo.unet(train.image_shape, len(train.classes), seed=0)
    options = dl.TrainingOptions.from_recipe("unet", epochs=epochs)
    dl.train(net, train, options, world=world)

    evaluation = dl.evaluate(net, test, world=world, confusion=True, test_flips="xy")
    counts = evaluation.confusion.counts  # pixels by (true class, predicted class)
    correct = counts.diagonal()
    iou = correct / (counts.sum(axis=0) + counts.sum(axis=1) - correct)
    world.report(accuracy=evaluation.accuracy, iou_background=iou[0], iou_cell=iou[1])
    world.report(weights_sha256=dl.weights_sha256(net))

    few = test.subset(range(4))
    predicted = dl.classify(net, few, world=world, test_flips="xy")
    if picture and world.rank == 0:
        draw(picture, few.read(range(4)), few.targets(range(4)), predicted)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("epochs", nargs="?", type=int, default=8)
    parser.add_argument("images", nargs="?", type=int, default=800)
    parser.add_argument("--picture", metavar="FILE", help="draw the results (PNG)")
    main(**vars(parser.parse_args()))
