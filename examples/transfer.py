"""Demonstrate transfer learning with the steps of MATLAB's white paper on multiple GPUs.

A network learns the first half of the classes of a data set from many images. With a new last
layer, it then learns the other half from 20 images per class. The default data are Fashion-MNIST if
Debian's package dataset-fashion-mnist is installed, else the embedded digits.

    mpirun -n 2 python examples/transfer.py [DATA] [EPOCHS] [EPOCHS OF PRETRAINING]

Like the white paper "Deep Learning with MATLAB and Multiple GPUs", the example scales the
mini-batch and the learning rate by the number of ranks, so its weights depend on that number.
"""

import os
import sys

import numpy as np

import mpidl as dl

FASHION = "/usr/share/datasets/fashion-mnist"
PER_CLASS = 20


def halves(images):
    """Return two sets: the images of the first and of the second half of the classes."""
    middle = len(images.classes) // 2
    sets = []
    for first, stop in ((0, middle), (middle, len(images.classes))):
        (indices,) = np.nonzero((images.labels >= first) & (images.labels < stop))
        labels = images.labels[indices] - first
        classes = images.classes[first:stop]
        sets.append(dl.ArrayDatastore(images.read(indices), labels, classes))
    return sets


def main(data=None, epochs=40, pretraining_epochs=3):
    world = dl.World()
    images, test = dl.data.open_data(
        data or (FASHION if os.path.isdir(FASHION) else "digits"), world
    )
    if test is None:
        images, test = images.split(0.9)
    first_half, images = halves(images)
    test = halves(test)[1]
    few, _ = images.split(min(1.0, PER_CLASS / max(np.bincount(images.labels))))

    # Get a pretrained network. The white paper loads AlexNet, for which mpidl has dl.load_model,
    # dl.load_onnx and dl.load_weights.
    pretrained = dl.nn.zoo.digits(images.image_shape, len(first_half.classes))
    options = dl.TrainingOptions.from_recipe(
        "digits", epochs=int(pretraining_epochs), plots="none", verbose="off"
    )
    dl.train(pretrained, first_half, options, world=world)
    world.report(pretrained_on=", ".join(pretrained.classes))

    # 1. Look at the layers. The last layer has an output for each old class.
    if world.rank == 0:
        print(pretrained, "\nThe new classes:", ", ".join(few.classes))

    # 2. Replace the last layer. The new layer learns 20 times as fast as the other layers.
    net = dl.transfer(pretrained, few.classes, new_layer_factor=20)

    # 3. Scale the mini-batch and the learning rate by the number of workers. The rate drops to a
    #    tenth every 20 epochs.
    options = dl.TrainingOptions(
        epochs=int(epochs),
        batch_per_rank=16,
        learning_rate=0.00125,
        scale_rate=16,
        learn_rate_schedule="piecewise",
        learn_rate_drop_factor=0.1,
        learn_rate_drop_period=20,
        shuffle="every-epoch",
        plots="none",
        verbose="off",
    )

    # 4. Train.
    result = dl.train(net, few, options, world=world)
    world.report(images=len(few), epochs=result.epochs, loss=result.loss)

    # 5. Test.
    evaluation = dl.evaluate(net, test, world=world, confusion=True)
    if world.rank == 0:
        print(evaluation.confusion)
    world.report(accuracy=evaluation.accuracy)

    # For comparison, train in the same way without the pretrained weights.
    scratch = dl.nn.zoo.digits(images.image_shape, len(few.classes))
    dl.train(scratch, few, options, world=world)
    accuracy = dl.evaluate(scratch, test, world=world).accuracy
    world.report(accuracy_without_pretraining=accuracy)
    world.report(weights_sha256=dl.weights_sha256(net))


if __name__ == "__main__":
    main(*sys.argv[1:])
