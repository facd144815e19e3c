"""Run the parallel training loop of MATLAB's documentation, in which every rank has a partition.

Each rank shuffles and reads its own images, normalizes with its own statistics, and weights its
loss and gradients by its part of the mini-batch. The ranks add up the losses and gradients as plain
arrays, and then pool the running state. The loop works, and demonstrates gop and gplus. However,
the weights depend on the number of ranks. Each epoch ends as soon as one rank runs out of images,
and the other ranks drop their remaining images. custom_loop.py has neither problem and is shorter.

    mpirun -n 4 python examples/matlab_loop.py [FOLDER OF IMAGES] [EPOCHS]
"""

import sys

import mpidl as dl


def model_loss(net, images, labels):
    return dl.softmax_cross_entropy(net(images), labels)


def aggregate_state(world, weight, before, after, decay=0.1):
    """Return the running state, pooled over the ranks, which updated the old state separately.

    The statistics of a rank's images are (after - (1 - decay) * before) / decay. The variance
    of all images is the mean of the variances plus the variance of the means.
    """
    own = {name: (after[name] - (1 - decay) * old) / decay for name, old in before.items()}
    state = {}
    for name, old in before.items():
        layer, kind = name.rsplit(".", 1)
        pooled = world.gplus(weight * own[name])
        if kind == "variance":
            mean = world.gplus(weight * own[f"{layer}.mean"])
            pooled += world.gplus(weight * (own[f"{layer}.mean"] - mean) ** 2)
        state[name] = ((1 - decay) * old + decay * pooled).astype(old.dtype)
    return state


def main(data="digits", epochs=20):
    world, alone = dl.World(), dl.OneRank()  # all ranks; only this rank
    images, _ = dl.data.open_data(data, world)
    train, test = images.split(0.9, seed=0)
    own = train.subset(range(world.rank, len(train), world.size))  # partition(imds, N, i)
    size = 128 // world.size + (world.rank < 128 % world.size)  # the first ranks take the remainder
    queue = dl.MinibatchQueue(own, batch_size=size, seed=world.rank, world=alone)
    net = dl.nn.zoo.digits(train.image_shape, len(train.classes))
    sgdm = dl.SGDM(learning_rate=0.01, momentum=0.9)

    for epoch in range(1, int(epochs) + 1):
        batches = queue.epoch(epoch)
        batch = next(batches, None)
        while world.gop("and", batch is not None):  # gop(@and, hasdata(mbq))
            loss, gradients, state = dl.value_and_grad(model_loss)(net, *batch)
            loss, gradients = alone.gplus(loss), alone.gplus(gradients)  # own values, as arrays
            count = batch[0].batch.count
            weight = count / world.gplus(count)
            loss = world.gplus(weight * loss)
            gradients = world.gplus({name: weight * g for name, g in gradients.items()})
            net.state = aggregate_state(world, weight, net.state, state)
            net.parameters = sgdm(net.parameters, gradients)
            batch = next(batches, None)
        world.report(epoch=epoch, loss=loss)

    world.report(accuracy=dl.evaluate(net, test, world=world).accuracy)
    world.report(weights_sha256=dl.weights_sha256(net))


if __name__ == "__main__":
    main(*sys.argv[1:])
