"""Train the digits network in a custom loop, with the same weights as `dl.train`.

mpirun -n 4 python examples/custom_loop.py [FOLDER OF IMAGES] [EPOCHS]
"""

import sys

import mpidl as dl


def model_loss(net, images, labels):
    return dl.softmax_cross_entropy(net(images), labels)


def main(data="digits", epochs=20):
    world = dl.World()  # this rank and the number of ranks
    images, _ = dl.data.open_data(data, world)
    train, test = images.split(0.9, seed=0)
    layers = [dl.Conv2D(5, 20), dl.BatchNorm(), dl.ReLU()]
    layers += [dl.Conv2D(3, 20, padding=1), dl.BatchNorm(), dl.ReLU()]
    layers += [dl.Conv2D(3, 20, padding=1), dl.BatchNorm(), dl.ReLU()]
    layers += [dl.Dense(len(train.classes))]
    net = dl.Network(layers, train.image_shape, seed=0)
    queue = dl.MinibatchQueue(train, batch_size=128, seed=0, world=world)
    sgdm = dl.SGDM(learning_rate=0.01, momentum=0.9)
    step = dl.value_and_grad(model_loss)  # reduce=world would sum during backward

    for epoch in range(1, int(epochs) + 1):
        for share, labels in queue.epoch(epoch):  # this rank's share of the mini-batch
            loss, gradients, net.state = step(net, share, labels)
            loss, gradients = world.gplus(loss), world.gplus(gradients)  # sums over all ranks
            net.parameters = sgdm(net.parameters, gradients)
        world.report(epoch=epoch, loss=loss)  # rank 0 prints

    world.report(accuracy=dl.evaluate(net, test, world=world).accuracy)
    world.report(weights_sha256=dl.weights_sha256(net))


if __name__ == "__main__":
    main(*sys.argv[1:])
