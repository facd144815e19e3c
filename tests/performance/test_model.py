"""The prediction, against records that known costs generate."""

from dataclasses import replace

import numpy as np
import pytest

from mpidl import fold, keyed
from mpidl.performance import prediction, probe
from mpidl.performance.links import SIZES
from mpidl.performance.model import Error, Model, rounds_of_blocks
from mpidl.performance.simulation import Link, Network
from mpidl.performance.trace import AGREE, BUCKET, FINISH, SUM, Event

STEP, BLOCK = 2e-3, 3e-3  # seconds
NETWORK = Network(2e-6, Link(4e-6, 2e-10), Link(4e-6, 2e-10), 0.0, 3e-5, ranks_per_node=2)
EVENTS = [
    Event(AGREE, 1, 8),
    Event(SUM, 41, 8, "moments"),
    Event(BUCKET, 90_000, 4),
    Event(BUCKET, 33_000, 4),
    Event(FINISH),
    Event(SUM, 2, 8),
]
PLACES = [0.01, 0.2, 0.5, 0.8, 0.9, 0.95]


def record(noise=0.0, threads=1, batch_size=128, step=STEP, block=BLOCK, network=NETWORK):
    """Return the record of a probe of 2 ranks in which all times follow known costs."""
    steps = []
    for number in range(5):
        for active in (1, 2):
            for blocks in (1, 2, 4, 8):
                error = 2 * keyed.uniform(1, f"{number} {active} {blocks}", 1)[0] - 1
                time = step + block * rounds_of_blocks(blocks, threads)
                time *= 1 + noise * error
                kind = {"round": number, "active": active, "blocks": blocks}
                steps.append({**kind, "slowest": [time] * 11, "input": 0.0, "places": PLACES})
    latency, per_byte = network.inside
    pair = {
        "sizes": list(SIZES),
        "ping_pong": [2 * network.overhead + latency + per_byte * size for size in SIZES],
        "burst": 2 * network.overhead,
    }
    result = {
        **{"ranks": 2, "hosts": 1, "ranks_per_host": 2, "threads": threads, "workers": 1},
        **{"images": 12_800, "batch_size": batch_size, "batch_per_rank": None},
        **{"batchnorm": "global", "copy_seconds_per_byte": 0.0, "rounds": 5},
        **{"reading_seconds_per_block": 1e-4, "is_oversubscribed": False, "steps": steps},
        "events": [list(event) for event in EVENTS],
    }
    times = {event: simulated(event, 2, 8, network) for event in EVENTS if event.kind != FINISH}
    folds = [[list(event), time] for event, time in times.items()]
    result["network"] = [{"inside": pair, "folds": folds, "hidden": 1.0}] * 5
    return result


def simulated(event, ranks, leaves, network):
    """Return the time of an exchange of two ranks: one message each way."""
    nbytes = event.width * event.itemsize
    if event.kind == AGREE:
        return 1e-5
    assert ranks == 2 and fold.split_blocks(leaves, 2)
    latency, per_byte = network.inside
    combined = nbytes * network.per_combined_byte
    return network.per_exchange + 2 * network.overhead + latency + nbytes * per_byte + combined


def test_costs_are_recovered():
    network = NETWORK._replace(per_combined_byte=5e-10)
    model = Model(record(network=network))
    assert model.fit(1) == pytest.approx((STEP, BLOCK)) == model.fit(2)
    assert model.fit_error < 1e-9 and model.exchanges.fold_error < 0.01
    measured = model.exchanges.network
    assert measured.overhead == pytest.approx(network.overhead)
    assert measured.inside == pytest.approx(network.inside)
    # A combined byte of the small exchanges counts as part of their fixed cost.
    assert measured.per_exchange == pytest.approx(network.per_exchange, rel=0.01)
    assert measured.per_combined_byte == pytest.approx(network.per_combined_byte, rel=0.01)


def test_an_exchange_faster_than_its_messages():
    """Messages in both directions overlap: the exchange, not the ping-pong, sets the speed."""
    fast = record()
    for event, i in ((EVENTS[2], 2), (EVENTS[3], 3)):
        double = NETWORK._replace(inside=NETWORK.inside._replace(per_byte=1e-10))
        fast["network"][0]["folds"][i][1] = simulated(event, 2, 8, double)
    assert Model(fast).exchanges.network.inside.per_byte == pytest.approx(1e-10)


def test_a_step_of_two_ranks():
    """Blocking sums add their time; the buckets end while backward runs."""
    model = Model(record())
    sums = 1e-5 + sum(simulated(event, 2, 8, NETWORK) for event in (EVENTS[1], EVENTS[-1]))
    step = model.step(2, model.setting)
    assert step.seconds == pytest.approx(STEP + 4 * BLOCK + sums)
    assert step.sum == pytest.approx(sums) and step.wait == pytest.approx(0)
    visible = record()
    visible["network"] = [item | {"hidden": 0.0} for item in visible["network"]]
    buckets = sum(simulated(event, 2, 8, NETWORK) for event in EVENTS if event.kind == BUCKET)
    assert Model(visible).step(2, model.setting).sum == pytest.approx(sums + buckets)


@pytest.mark.parametrize(("ranks", "blocks"), [(1, 8), (2, 4), (3, 3), (5, 2), (8, 1), (20, 1)])
def test_whole_blocks_count(ranks, blocks):
    """The rank with most blocks sets the time: 8 blocks on 3 ranks take as long as 9."""
    model = Model(record())
    step = model.step(ranks, model.setting)
    assert step.seconds - step.sum == pytest.approx(STEP + blocks * BLOCK)
    compute = STEP + 8 / ranks * BLOCK if ranks <= 8 else None
    if compute is not None:
        assert step.compute == pytest.approx(compute) and step.wait == pytest.approx(
            (blocks - 8 / ranks) * BLOCK
        )


def test_threads_share_blocks():
    assert [rounds_of_blocks(b, 4) for b in (1, 2, 4, 5, 8, 9)] == [0.25, 0.5, 1, 2, 2, 3]
    model = Model(record(threads=2))
    assert model.fit(1) == pytest.approx((STEP, BLOCK))
    step = model.step(1, replace(model.setting, threads=4))
    assert step.seconds == pytest.approx(STEP + 2 * BLOCK)


def test_the_last_mini_batch_of_an_epoch():
    """12,800 images are 100 full mini-batches of 128, or 99 of 129 and one of 29."""
    model = Model(record())
    assert model.epoch_seconds(1, model.setting) == pytest.approx(100 * (STEP + 8 * BLOCK))
    odd = replace(model.setting, batch_size=129)
    expected = 99 * (STEP + 9 * BLOCK) + STEP + 2 * BLOCK
    assert model.epoch_seconds(1, odd) == pytest.approx(expected)


def test_the_slowest_of_many_ranks():
    """The mean of the largest of N exponential numbers is 1 + 1/2 + ... + 1/N."""
    count = 20_000
    times = -np.log(1 - (np.arange(count) + 0.5) / count)
    slowest = probe.slowest_of(np.stack([times, 0 * times + 3], axis=1))
    for k in range(6):
        harmonic = sum(1 / n for n in range(1, 2**k + 1))
        assert slowest[k] == pytest.approx(harmonic + 3, rel=0.01)
    assert len(slowest) == 11


def test_scaling_stops_where_half_is_lost():
    """Without a network, the efficiency on N ranks is (s + 8 b) / (N (s + 8 / N b))."""
    free = Network(0.0, Link(0.0, 0.0), Link(0.0, 0.0), ranks_per_node=2)
    quiet = record(network=free)
    quiet["network"] = [
        item | {"folds": [[event, 1e-12] for event, _ in item["folds"]]}
        for item in quiet["network"]
    ]
    model = Model(quiet)
    efficiency = {n: (STEP + 8 * BLOCK) / n / (STEP + 8 / n * BLOCK) for n in (1, 2, 4, 8)}
    assert efficiency[8] > 0.5  # and 16 ranks would have no more than 8 blocks
    stop = prediction.find_stop(model, model.setting, 256)
    assert stop["ranks"] == 8 and stop["reason"] == "ranks without blocks of 16 images"
    assert stop["options"]["--batch-size 256"] == 16
    assert stop["options"]["--batch-size 512"] == 32
    assert "--batchnorm local" not in stop["options"]  # it would save nothing
    for row in prediction.predict(quiet, [1, 2, 4, 8])["rows"]:
        assert row["efficiency"] == pytest.approx(efficiency[row["ranks"]], rel=1e-6)
        assert row["error"] < 1e-6


def test_weak_scaling_does_not_stop_without_a_network():
    free = Network(0.0, Link(0.0, 0.0), Link(0.0, 0.0), ranks_per_node=2)
    model = Model(record(network=free))
    weak = replace(model.setting, batch_per_rank=64)
    rates = [model.images_per_second(n, weak) for n in (1, 2, 4)]
    sums = [model.step(n, weak).sum for n in (1, 2, 4)]
    for n, rate, seconds in zip((1, 2, 4), rates, sums, strict=True):
        assert rate == pytest.approx(n * 64 / (STEP + 4 * BLOCK + seconds), rel=0.02)


def test_a_slower_link_stops_scaling_earlier():
    """The assumed link counts between nodes only."""
    probed = record()
    rates = {
        latency: [
            row["images_per_second"]
            for row in prediction.predict(probed, [2, 4], Link(latency, 1e-9), 2)["rows"]
        ]
        for latency in (1e-6, 1e-3)
    }
    assert rates[1e-6][0] == rates[1e-3][0] and rates[1e-6][1] > 1.1 * rates[1e-3][1]


def test_the_error_follows_the_noise():
    """The same record gives the same error; with more noise it is larger, and it covers it."""
    errors = []
    for noise in (0.0, 0.2):
        model = Model(record(noise))
        error = Error(model)
        speed, efficiency = error.relative(2, model.setting)
        truth = Model(record()).step(2, model.setting).seconds
        assert abs(model.step(2, model.setting).seconds / truth - 1) <= speed + 1e-9
        errors.append(speed)
        assert error.relative(1, model.setting)[1] == 0
    assert errors[0] < 1e-9 < 0.01 < errors[1] < 0.3
    assert Error(Model(record(0.2))).relative(2, model.setting) == (speed, efficiency)


@pytest.mark.parametrize(
    ("leaves", "threads", "expected"),
    [
        (8, 1, [1, 2, 4, 8]),
        (1, 1, [1]),
        (3, 1, [1, 2, 3]),
        (8, 4, [1, 4, 8]),
        (99, 2, [1, 2, 4, 8, 16]),
    ],
)
def test_the_numbers_of_blocks_of_a_probe(leaves, threads, expected):
    assert probe.block_counts(leaves, threads) == expected


def test_the_active_ranks_of_a_probe():
    assert [probe.active_counts(n) for n in (1, 2, 6)] == [[1], [1, 2], [1, 2, 4, 6]]
