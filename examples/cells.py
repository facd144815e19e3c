"""Find cells in images: train a U-Net on the embedded set, and measure the intersection over union.

The set has 800 training images and 200 test images. Each image shows 4 to 12 cells with noise. Its
target is the class of each pixel: 1 in a cell, else 0. Images and masks are mirrored together.

    mpirun -n 2 python examples/cells.py [EPOCHS] [IMAGES]
"""

import sys

import mpidl as dl


def main(epochs=8, images=800):
    world = dl.World()
    train, test = dl.data.cells("train").subset(range(int(images))), dl.data.cells("test")
    net = dl.nn.zoo.unet(train.image_shape, len(train.classes), seed=0)
    options = dl.TrainingOptions.from_recipe("unet", epochs=int(epochs))
    dl.train(net, train, options, world=world)

    evaluation = dl.evaluate(net, test, world=world, confusion=True, test_flips="xy")
    counts = evaluation.confusion.counts  # pixels by (true class, predicted class)
    correct = counts.diagonal()
    iou = correct / (counts.sum(axis=0) + counts.sum(axis=1) - correct)
    world.report(accuracy=evaluation.accuracy, iou_background=iou[0], iou_cell=iou[1])
    world.report(weights_sha256=dl.weights_sha256(net))


if __name__ == "__main__":
    main(*sys.argv[1:])
