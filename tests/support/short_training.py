"""Train a small network on small images, whose class is the position of a bright row."""

import numpy as np
from single_rank import numbers

import mpidl as dl

SIDE, CLASSES = 6, 3


def small(*extra_layers):
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), *extra_layers, dl.Dense(CLASSES)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=1)


def pictures(count, name="pictures"):
    images = numbers(f"training {name}", count, 1, SIDE, SIDE, low=0, high=200).astype(np.uint8)
    labels = np.arange(count) * 7 % CLASSES
    images[np.arange(count), 0, labels, :] = 255  # the class is the row number
    return dl.ArrayDatastore(images, labels)


def trained(world, net=None, store=None, **options):
    net = small() if net is None else net
    options = dl.TrainingOptions(**{"epochs": 2, "batch_size": 40, "verbose_every": 0} | options)
    store = pictures(100) if store is None else store
    return net, dl.train(net, store, options, world=world)
