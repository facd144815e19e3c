"""Test gradient accumulation: the same bytes as without parts, and batch-norm statistics."""

import dataclasses

import numpy as np
import pytest
from short_training import CLASSES, SIDE, pictures, small, trained

import mpidl as dl
from mpidl.core.blocks import OneRank
from mpidl.core.fold import Tree
from mpidl.data.parts import part_blocks, parts_of, share_parts
from mpidl.errors import UserError
from mpidl.losses import CrossEntropy
from mpidl.training.batchnorm_population import population_state
from mpidl.training.files.model_file import weights_sha256


def plain():
    """Return a network without batch normalization, so that images do not affect each other."""
    layers = [dl.Conv2D(3, 4), dl.ReLU(), dl.Dropout(0.2), dl.Dense(CLASSES)]
    return dl.Network(layers, (1, SIDE, SIDE), seed=1)


def hash_of(world, net, count=300, **options):
    options = {"batch_size": 150, "learning_rate": 0.05, "accumulate": 1} | options
    return weights_sha256(trained(world, net, pictures(count), **options)[0])


def test_parts_are_nodes_of_the_tree():
    """Each part of a mini-batch is a node of the reduction tree.

    Parts have 2**k blocks, where k is as small as the requested number of parts allows.
    """
    for count in (*range(1, 40), 100, 128, 150, 511, 512, 513, 2048):
        leaves = -(-count // 16)
        for parts in range(1, 9):
            blocks = part_blocks(count, parts)
            assert blocks & (blocks - 1) == 0 and -(-leaves // blocks) <= parts
            assert blocks == 1 or -(-leaves // (blocks // 2)) > parts
            batch = share_parts(count, blocks, OneRank(), np.arange(count))
            assert np.array_equal(batch.indices, np.arange(count)) and batch.blocks == leaves
            assert sum(map(batch.valid, range(leaves))) == count
            assert all(part.per_image == 1 / count for part in batch.parts)
            tree = Tree(leaves, ((0, leaves),), 0)
            firsts = range(0, leaves, blocks)
            assert all(tree.joins(first, min(first + blocks, leaves)) for first in firsts)


def test_every_rank_has_its_share_of_each_part(world):
    queue = dl.MinibatchQueue(pictures(150), 150, 3, world)
    reference = dl.MinibatchQueue(pictures(150), 150, 3)
    queue.parts = 4
    (images, labels), (expected, _) = next(queue.epoch(1)), next(reference.epoch(1))
    assert images.shape == expected.shape == (150, 1, SIDE, SIDE)
    parts, start = list(parts_of(images, labels)), 0
    assert [part.batch.count for part, _ in parts] == [64, 64, 22]
    for part, part_labels in parts:
        first, stop = part.batch.images
        assert part_labels.batch is part.batch and part.lanes.flags.c_contiguous
        blocks = slice(start // 16 + part.batch.tree.run[0], start // 16 + part.batch.tree.run[1])
        assert np.array_equal(part.lanes, expected.lanes[blocks])
        order = reference.order(1)[start + first : start + stop]
        assert np.array_equal(part.batch.indices, order)
        start += part.batch.count
    assert world.size > 3 or all(part.batch.blocks for part, _ in parts[:2])


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parts_give_the_bytes_of_the_whole_mini_batch(precision, world):
    """The bytes are also equal if the last mini-batch is smaller, or if a part has one image."""
    options = {"precision": precision}
    for count in (300, 257):
        parts = (1, 2, 3, 5, 10)
        hashes = {k: hash_of(world, plain(), count, accumulate=k, **options) for k in parts}
        assert len(set(hashes.values())) == 1, hashes
    assert hash_of(world, plain(), 257, accumulate=1, seed=1, **options) != hashes[1]


def test_statistics_of_batch_normalization_are_those_of_a_part(world):
    hashes = {hash_of(world, small(), accumulate=k) for k in (1, 2, 5)}
    assert len(hashes) == 3
    assert hash_of(world, small(), accumulate=3) != hash_of(world, small(), accumulate=2)
    assert hash_of(world, small(), accumulate=3) == hash_of(world, small(), accumulate=4)
    net, _ = trained(world, small(), pictures(300), batch_size=150, accumulate=4, epochs=1)
    queue = dl.MinibatchQueue(pictures(300), 64, 0, world, "never", **net.input_transform())
    for name, value in population_state(net, queue, world).items():
        assert np.array_equal(net.state[name], value)


def rows(blocked):
    """Return the images or labels of a Blocked value on one rank, (N, ...)."""
    return np.concatenate([blocked.block(b) for b in range(blocked.batch.blocks)])


def test_pytorch_takes_the_same_steps():
    """A PyTorch loop that adds up the gradients of three parts gives the same weights."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    net, world = small(), dl.World(threads=1)
    options = {"batch_size": 150, "accumulate": 3, "epochs": 1, "l2": 0.0, "learning_rate": 0.1}
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()),
        *(torch.nn.Flatten(), torch.nn.Linear(4 * (SIDE - 2) ** 2, CLASSES)),
    ).double()
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), net.parameters.values(), strict=True):
            parameter.copy_(torch.tensor(array).reshape(parameter.shape))
    mini_batches = []

    class Batches:
        def start(self, trainer):
            for images, labels in trainer.queue.epoch(1):
                mini_batches.append([tuple(map(rows, part)) for part in parts_of(images, labels)])

    settings = dl.TrainingOptions(verbose_every=0, batchnorm_statistics="moving", **options)
    dl.train(net, pictures(300), settings, world=world, hooks=[Batches()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert [[len(labels) for _, labels in parts] for parts in mini_batches] == [[64, 64, 22]] * 2
    for parts in mini_batches:
        optimizer.zero_grad()
        for images, labels in parts:
            loss = torch.nn.functional.cross_entropy(
                model(torch.tensor(images).double()), torch.tensor(labels).long(), reduction="sum"
            )
            (loss / 150).backward()
        optimizer.step()
    for parameter, array in zip(model.parameters(), net.parameters.values(), strict=True):
        expected = parameter.detach().numpy().reshape(array.shape)
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=2e-6)
    moving = model[1].running_mean.numpy()
    np.testing.assert_allclose(net.state["batchnorm1.mean"], moving, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_results_are_those_of_the_mini_batch(world, graphs):
    """The logged loss has the same bytes with parts, for replayed and for eager steps."""
    records = []
    for parts in (1, 3):
        infos = []
        options = {"batch_size": 150, "accumulate": parts, "output_functions": infos.append}
        options |= {"graphs": graphs}
        trained(world, plain(), pictures(257), **options)
        records.append([(i.loss, i.accuracy) for i in infos if i.state == "iteration"])
    assert records[0] == records[1]


def test_a_loss_that_is_not_finite_names_the_ranks(world):
    with pytest.raises(dl.Fault, match=r"the loss is (nan|inf) .*on (all ranks|rank)"):
        trained(world, plain(), pictures(300), batch_size=150, accumulate=3, learning_rate=1e30)


def custom_loss(net, images, labels):
    return dl.softmax_cross_entropy(net(images), labels)


@dataclasses.dataclass
class WithoutHash:
    factor: float = 1.0

    def __call__(self, net, images, labels):
        return custom_loss(net, images, labels) * self.factor


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss": WithoutHash()}, "expected the loss crossentropy, .*, found WithoutHash"),
        ({"sampling": "partition"}, "--sampling partition divides whole mini-batches"),
        ({"class_weights": "balanced"}, "--class-weights divides by a sum over the whole"),
        ({"ignore_label": 255}, "--ignore-label divides by a sum over the whole"),
        (
            {"loss": "crossentropy+dice", "class_weights": (1, 2, 3)},
            "--class-weights divides by a sum over the whole",
        ),
        ({"loss": custom_loss}, "expected the loss crossentropy, .*, mae, found custom_loss"),
    ],
)
def test_what_cannot_be_accumulated_is_refused(world, changes, text):
    with pytest.raises(UserError, match=f"--accumulate 4: .*{text}"):
        trained(world, plain(), accumulate=4, **changes)
    with pytest.raises(UserError, match="accumulate must be at least 1, found 0"):
        trained(world, plain(), accumulate=0)


def test_a_smoothed_loss_is_accumulated(world):
    loss = CrossEntropy(label_smoothing=0.1)
    hashes = {hash_of(world, plain(), loss=loss, accumulate=k) for k in (1, 4)}
    hashes.add(hash_of(world, plain(), label_smoothing=0.1, accumulate=2))
    assert len(hashes) == 1
