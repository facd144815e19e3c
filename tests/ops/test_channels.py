"""Test the ops that select and reorder channels."""

import numpy as np
import pytest
from op_references import Case, OpChecks, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl


def shuffled(x, groups):
    n, channels, *pixels = x.shape
    return x.reshape(n, groups, channels // groups, *pixels).swapaxes(1, 2).reshape(x.shape)


class TestChannels(OpChecks):
    cases = {
        "shuffle": Case(lambda x: dl.channel_shuffle(x, 3), lambda x: shuffled(x, 3), [(6, 2, 3)]),
        "shuffled features": Case(
            lambda x: dl.channel_shuffle(x, 2), lambda x: shuffled(x, 2), [(8,)]
        ),
        "slice": Case(lambda x: dl.channel_slice(x, 1, 3), lambda x: x[:, 1:3], [(5, 2, 3)]),
        "features": Case(lambda x: dl.channel_slice(x, 0, 3), lambda x: x[:, :3], [(4,)]),
        "halves in another order": Case(
            lambda x: dl.concat(dl.channel_slice(x, 2, 4), dl.channel_slice(x, 0, 2)),
            lambda x: np.roll(x, 2, axis=1),
            [(4, 3, 2)],
        ),
    }
    errors = [
        (lambda x, f, i: dl.channel_shuffle(i, 1), ValueError, "expected images or features"),
        (lambda x, f, i: dl.channel_shuffle(x, 0), ValueError, "groups must be an integer >= 1"),
        (lambda x, f, i: dl.channel_shuffle(f, 2), ValueError, "groups must divide 3 channels"),
        (lambda x, f, i: dl.channel_slice(x, -1, 1), ValueError, "start must be an integer >= 0"),
        (
            lambda x, f, i: dl.channel_slice(x, 1, 3),
            ValueError,
            "expected start < stop <= 2, the number of channels, got 1 and 3",
        ),
        (lambda x, f, i: dl.channel_slice(x, 1, 1), ValueError, "expected start < stop"),
    ]


def test_shuffling_against_pytorch(world):
    torch, _ = torch_functions()
    x = numbers("images", 18, 12, 2, 3, dtype=np.float32)
    for groups in (1, 2, 3, 4, 12):
        expected = torch.nn.ChannelShuffle(groups)(torch.from_numpy(x)).numpy()
        y = all_images(world, dl.channel_shuffle(blocked(world, x), groups))
        assert y.tobytes() == expected.tobytes()


def test_the_layers():
    layers = [dl.ChannelShuffle(2), dl.ChannelSlice(1, 5)]
    net = dl.Network(layers, (6, 2, 3))
    assert net.layer_names == ["channelshuffle1", "channelslice1"]
    assert net.output_shapes == [(6, 2, 3), (4, 2, 3)]
    assert dl.Network.from_spec(net.spec(), (6, 2, 3)).spec() == net.spec()
    with pytest.raises(ValueError, match="channelshuffle1: groups must divide 6 channels, got 4"):
        dl.Network([dl.ChannelShuffle(4)], (6, 2, 3))
    with pytest.raises(ValueError, match="channelslice1: expected start < stop <= 6"):
        dl.Network([dl.ChannelSlice(3, 7)], (6, 2, 3))
