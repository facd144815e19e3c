"""Test the prediction of training speed with records that are generated from known costs."""

from dataclasses import replace

import numpy as np
import pytest

from mpidl.comm.simulation import Link, Network
from mpidl.core import fold, keyed
from mpidl.performance import prediction, probe
from mpidl.performance.links import SIZES
from mpidl.performance.model import Model, most_blocks, rounds_of_blocks
from mpidl.performance.prediction import Error
from mpidl.performance.trace import AGREE, BUCKET, FINISH, SUM, Event

STEP, BLOCK = 2e-3, 3e-3  # seconds
READING = 1e-4  # seconds per block
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
        **{
            "ranks": 2,
            "hosts": 1,
            "ranks_per_host": 2,
            "shares_memory": False,
            "threads": threads,
            "workers": 1,
        },
        **{"images": 12_800, "batch_size": batch_size, "batch_per_rank": None},
        **{"copy_seconds_per_byte": 0.0, "rounds": 5, "coupled": []},
        **{"reading_seconds_per_block": READING, "is_oversubscribed": False, "steps": steps},
        "events": [list(event) for event in EVENTS],
    }
    times = {event: simulated(event, 2, 8, network) for event in EVENTS if event.kind != FINISH}
    folds = [[list(event), time] for event, time in times.items()]
    result["network"] = [{"inside": pair, "folds": folds, "hidden": 1.0}] * 5
    return result


def simulated(event, ranks, leaves, network):
    """Return the time of an exchange between two ranks: one message each way."""
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
    # Combining the bytes of small exchanges counts as part of their fixed cost.
    assert measured.per_exchange == pytest.approx(network.per_exchange, rel=0.01)
    assert measured.per_combined_byte == pytest.approx(network.per_combined_byte, rel=0.01)


def test_an_exchange_faster_than_its_messages():
    """Messages in both directions overlap, so the exchange, not the ping-pong, sets the speed."""
    fast = record()
    for event, i in ((EVENTS[2], 2), (EVENTS[3], 3)):
        double = NETWORK._replace(inside=NETWORK.inside._replace(per_byte=1e-10))
        fast["network"][0]["folds"][i][1] = simulated(event, 2, 8, double)
    assert Model(fast).exchanges.network.inside.per_byte == pytest.approx(1e-10)


def test_a_step_of_two_ranks():
    """Blocking sums add their time; the buckets are summed while backward runs."""
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
    """The rank with the most blocks sets the time: 8 blocks on 3 ranks take as long as 9."""
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
    """12,800 images give 100 full mini-batches of 128, or 99 of 129 and one of 29.

    The first mini-batch of an epoch is read before the first step.
    """
    model = Model(record())
    expected = 100 * (STEP + 8 * BLOCK) + 8 * READING
    assert model.epoch_seconds(1, model.setting) == pytest.approx(expected)
    odd = replace(model.setting, batch_size=129)
    expected = 99 * (STEP + 9 * BLOCK) + STEP + 2 * BLOCK + 9 * READING
    assert model.epoch_seconds(1, odd) == pytest.approx(expected)


def test_the_slowest_of_many_ranks():
    """The expected maximum of N exponential numbers is 1 + 1/2 + ... + 1/N."""
    count = 20_000
    times = -np.log(1 - (np.arange(count) + 0.5) / count)
    slowest = probe.slowest_of([np.stack([times, 0 * times + 3], axis=1)])
    for k in range(6):
        harmonic = sum(1 / n for n in range(1, 2**k + 1))
        assert slowest[k] == pytest.approx(harmonic + 3, rel=0.01)
    assert len(slowest) == 11


def test_a_rank_that_is_always_slower():
    """Two ranks must wait for the slower rank in every step, not in three of four steps."""
    fast = np.linspace(1.0, 1.1, 50)[:, None]
    slowest = probe.slowest_of([fast, fast + 1])
    assert slowest[0] == pytest.approx(1.55)  # one rank: the mean of both
    assert slowest[1] == pytest.approx(2.05)
    assert slowest[2] > slowest[1]


def test_measured_sizes_are_not_replaced_by_a_line():
    """8 blocks take twice as long as a straight line through the other times predicts."""
    knee = record()
    for item in knee["steps"]:
        item["slowest"] = (
            [2 * t for t in item["slowest"]] if item["blocks"] == 8 else item["slowest"]
        )
    model = Model(knee)
    times = {blocks: STEP + blocks * BLOCK for blocks in (1, 2, 4, 8)} | {8: 2 * (STEP + 8 * BLOCK)}
    slope = (times[8] - times[4]) / 4
    expected = times | {3: STEP + 3 * BLOCK, 6: (times[4] + times[8]) / 2, 16: times[8] + 8 * slope}
    for blocks, seconds in expected.items():
        setting = replace(model.setting, batch_size=16 * blocks)
        assert model.step(1, setting).seconds == pytest.approx(seconds)
    assert model.fit_error > 0.1


def test_measured_sums_are_not_replaced_by_the_simulation():
    """For the probe's number of ranks, measured times count, although no network explains them."""
    odd = record()
    event = [list(EVENTS[1]), 1e-3]
    odd["network"] = [item | {"folds": [event, *item["folds"][2:]]} for item in odd["network"]]
    odd["events"] = [list(EVENTS[1])]
    odd["steps"] = [item | {"places": [0.5]} for item in odd["steps"]]
    model = Model(odd)
    assert model.step(2, model.setting).sum == pytest.approx(1e-3)
    assert model.step(4, model.setting).sum < 2e-3


@pytest.mark.parametrize(("leaves", "ranks"), [(8, 1), (8, 2), (8, 3), (8, 5), (8, 8), (3, 8)])
def test_only_the_ranks_with_most_blocks_can_be_last(leaves, ranks):
    counts = [stop - start for start, stop in fold.split_blocks(leaves, ranks)]
    assert most_blocks(leaves, ranks) == (max(counts), counts.count(max(counts)))


def test_ranks_together_are_slower_than_the_parts():
    """The prediction for 2 ranks must equal the step that the probe measured on 2 ranks."""
    parts = Model(record())
    seconds = parts.step(2, parts.setting).seconds
    together = record() | {
        "coupled": [1.2 * seconds, 1.1 * seconds, 1.1 * seconds, seconds, 1.3 * seconds]
    }
    model = Model(together)
    setting = model.setting
    assert model.step(2, setting).seconds == pytest.approx(1.1 * seconds)
    assert model.step(1, setting) == parts.step(1, setting)
    for ranks in (4, 8):
        step, separate = model.step(ranks, setting), parts.step(ranks, setting)
        assert step.seconds == pytest.approx(1.1 * separate.seconds)
        assert step.compute + step.input + step.wait + step.sum == pytest.approx(step.seconds)
    errors = [Error(model).relative(ranks, setting)[0] for ranks in (1, 2, 4)]
    assert errors[0] < 1e-9 < errors[1] < errors[2]  # the factor is a guess on 4 ranks


def test_scaling_stops_where_half_is_lost():
    """Without communication, the efficiency on N ranks is (s + 8 b) / (N (s + 8 b / N)).

    A step takes s seconds, plus b seconds per block.
    """
    free = Network(0.0, Link(0.0, 0.0), Link(0.0, 0.0), ranks_per_node=2)
    quiet = record(network=free) | {"reading_seconds_per_block": 0.0}
    quiet["network"] = [
        item | {"folds": [[event, 1e-12] for event, _ in item["folds"]]}
        for item in quiet["network"]
    ]
    model = Model(quiet)
    efficiency = {n: (STEP + 8 * BLOCK) / n / (STEP + 8 / n * BLOCK) for n in (1, 2, 4, 8)}
    assert efficiency[8] > 0.5  # 16 ranks would have no more than 8 blocks
    stop = prediction.find_stop(prediction.Rates(model), model.setting, 256)
    assert stop["ranks"] == 8 and stop["reason"] == "ranks without blocks of 16 images"
    assert stop["options"]["--batch-size 256"] == 16
    assert stop["options"]["--batch-size 512"] == 32
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
    """The assumed link must affect only exchanges between nodes."""
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
    """A record's error estimate is reproducible, grows with noise, and covers the real error."""
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
        (10, 4, [1, 4, 8, 10]),
        (7, 4, [1, 4, 7]),  # 7 blocks take as long as 8
        (99, 2, [1, 2, 4, 8, 16, 32]),
    ],
)
def test_the_numbers_of_blocks_of_a_probe(leaves, threads, expected):
    assert probe.block_counts(leaves, threads) == expected


def test_the_active_ranks_of_a_probe():
    assert [probe.active_counts(n) for n in (1, 2, 6)] == [[1], [1, 2], [1, 2, 4, 6]]
