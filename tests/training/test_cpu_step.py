"""Test that replayed training steps on CPUs give the same bytes as eager steps."""

import dataclasses
import functools
import gc
import weakref

import numpy as np
import pytest
from cpu_builds import needs_kernels
from short_training import SIDE, pictures, small, trained
from single_rank import numbers

import mpidl as dl
from mpidl import phases
from mpidl.backends import settings
from mpidl.backends.cpu.recorder import Recorder
from mpidl.comm.host_memory import HostMemory
from mpidl.data import MinibatchQueue
from mpidl.nn import zoo
from mpidl.training import cpu_step
from mpidl.training.files.model_file import weights_sha256
from mpidl.training.optimizers import Clip, Optimizer, Rate
from mpidl.training.replayed_step import ReplayedStep
from mpidl.training.steps import EagerStep, StepInfo

pytestmark = needs_kernels


def residual():
    def layers():
        yield dl.Conv2D(3, 16, padding=1, name="in")
        yield dl.BatchNorm()
        yield dl.ReLU(name="trunk")
        yield dl.Conv2D(3, 16, padding=1)
        yield dl.BatchNorm(name="branch")
        yield dl.Add(inputs=["trunk", "branch"])
        yield dl.ReLU(name="sum")
        yield dl.Concat(inputs=["sum", "trunk"])
        yield dl.ChannelShuffle(4)
        yield dl.ChannelSlice(4, 28)
        yield dl.MaxPool2D(2)
        yield dl.AveragePool2D(2, stride=1)
        yield dl.Resize2D(scale=1.5, mode="bilinear")
        yield dl.AdaptiveAveragePool2D(3, name="small")
        yield dl.GlobalAveragePool2D()
        yield dl.HardSigmoid(name="gate")
        yield dl.Multiply(inputs=["small", "gate"])
        yield dl.Scale(0.5)
        yield dl.StochasticDepth(0.2)
        yield dl.Dropout(0.3)
        yield dl.Dense(20)
        yield dl.Tanh()
        yield dl.Dense(3)

    return dl.Network(layers(), (1, SIDE, SIDE), seed=1)


def frozen():
    return small().freeze(*small().layer_names[:2])


def image_normalized():
    layers = [
        *(dl.Conv2D(3, 12, padding=1), dl.LayerNorm(), dl.GELU(), dl.Conv2D(1, 12)),
        *(dl.GroupNorm(4, offset_learn_rate_factor=0), dl.ReLU(), dl.Conv2D(3, 8)),
        *(dl.InstanceNorm(affine=False), dl.Swish(), dl.LayerNorm("image"), dl.Dense(3)),
    ]
    return dl.Network(layers, (1, SIDE, SIDE), seed=1)


def recurrent():
    layers = [dl.LSTM(9, truncate=3), dl.GRU(7, returns="last", reverse=True)]
    return dl.Network([*layers, dl.Dense(3)], (1, SIDE, SIDE), seed=1)


NETWORKS = {"small": small, "residual": residual, "frozen": frozen}
NETWORKS["image_normalized"] = image_normalized
NETWORKS["recurrent"] = recurrent
SOLVERS = {
    "sgdm": lambda **factors: dl.SGDM(0.1, 0.9, **factors),
    "decay and clipping": lambda **factors: dl.SGDM(
        0.1, l2=0.01, gradient_threshold=0.5, nesterov=True, **factors
    ),
    "adam": lambda **factors: dl.Adam(0.01, **factors),
    "adamw": lambda **factors: dl.AdamW(0.01, **factors),
    "rmsprop": lambda **factors: dl.RMSProp(0.01, **factors),
}


def run(
    world,
    step_class,
    net,
    optimizer,
    change=lambda step, iteration: None,
    store=None,
    batch=40,
    epochs=3,
    parts=1,
    **queue_options,
):
    """Train. Return the step and the losses.

    By default, an epoch has two full mini-batches and a mini-batch of 20 images.
    """
    store = pictures(100) if store is None else store
    queue = MinibatchQueue(store, batch, 0, world, **queue_options)
    queue.parts = parts
    step = step_class(net, optimizer, "crossentropy", world, 1, None, lambda rate: "")
    if parts > 1:
        step.compute_parts()
    losses = []
    for epoch in range(1, epochs + 1):
        for images, labels in queue.epoch(epoch):
            iteration = len(losses) + 1
            optimizer.learning_rate = 0.1 / iteration
            info = StepInfo(epoch, iteration, images.batch.count, 0.1, 0.0)
            losses += [result.loss for result in step.submit(images, labels, info)]
            change(step, iteration)
    return step, losses


def results(net, optimizer):
    return net.parameters | net.state | optimizer.state()


def assert_equal(net, solver, world, **arguments):
    """Assert that eager and replayed steps give the same bytes. Return the replayed step."""
    nets = net(), net()
    optimizers = [solver(**net.factors) for net in nets]
    _, expected = run(world, EagerStep, nets[0], optimizers[0], **arguments)
    step, losses = run(world, ReplayedStep, nets[1], optimizers[1], **arguments)
    assert losses == expected
    arrays = [results(*pair) for pair in zip(nets, optimizers, strict=True)]
    assert {k: v.tobytes() for k, v in arrays[0].items()} == {
        k: v.tobytes() for k, v in arrays[1].items()
    }
    return step


def is_replayed(step):
    """Return whether full mini-batches are replayed, after a check."""
    return bool(step.programs) and step.largest.is_checked


@pytest.fixture(params=["fp32", "bf16"])
def precision(request, monkeypatch):
    monkeypatch.setattr(settings, "precision", request.param)


@pytest.mark.parametrize("net", NETWORKS)
def test_replays_have_the_bytes_of_eager_steps(net, world, precision):
    assert is_replayed(assert_equal(NETWORKS[net], SOLVERS["sgdm"], world))


@pytest.mark.parametrize("parts", [1, 3])
def test_replays_exchange_messages_if_the_ranks_share_no_memory(parts, world, monkeypatch):
    monkeypatch.setattr(HostMemory, "allocate", lambda transport: None)
    ranks = dl.World(threads=None)
    assert is_replayed(assert_equal(small, SOLVERS["decay and clipping"], ranks, parts=parts))
    ranks.close()


@pytest.mark.parametrize("solver", [name for name in SOLVERS if name != "sgdm"])
def test_all_solvers_are_recorded(solver, world):
    assert is_replayed(assert_equal(small, SOLVERS[solver], world))


@pytest.mark.parametrize("transforms", [(Rate,), (functools.partial(Clip, 1.0), Rate)])
def test_separate_transforms_on_ranks_without_images(transforms, world):
    """The update must not overwrite the memory of gradients that are equal on all ranks."""

    def solver(**factors):
        factors.pop("l2_factors")
        return Optimizer(0.1, *(transform() for transform in transforms), **factors)

    store = dl.ArrayDatastore(
        numbers("few", 24, 1, 12, 12, high=200).astype(np.uint8), np.arange(24) % 3
    )
    net = functools.partial(zoo.digits, (1, 12, 12), 3)
    assert is_replayed(assert_equal(net, solver, world, store=store, batch=24, epochs=3))


@pytest.mark.parametrize("net", NETWORKS)
@pytest.mark.parametrize("batch, parts", [(96, 3), (80, 5), (24, 2)])
def test_replayed_parts_have_the_bytes_of_eager_parts(net, batch, parts, world, precision):
    """Replays are correct for a smaller last part, and for a smaller mini-batch with full parts."""
    arguments = {"store": pictures(144), "batch": batch, "parts": parts}
    step = assert_equal(NETWORKS[net], SOLVERS["decay and clipping"], world, **arguments)
    assert is_replayed(step)


@pytest.mark.parametrize("parts", [1, 3])
def test_mixed_images_and_labels_are_replayed(parts, world):
    mixing = dl.data.Mixing(mixup=0.5, cutmix=1.0, probability=0.8)
    arguments = {"mixing": mixing, "classes": 3, "parts": parts, "batch": 48}
    step = assert_equal(small, SOLVERS["sgdm"], world, **arguments)
    assert is_replayed(step)


@pytest.fixture
def counts(monkeypatch):
    """A list that grows by 1 for each replayed gradient."""
    counts = []
    for name in ("gradient", "step"):
        replay = getattr(cpu_step.StepProgram, name)

        def count(self, *batch, replay=replay):
            counts.append(1)
            return replay(self, *batch)

        monkeypatch.setattr(cpu_step.StepProgram, name, count)
    return counts


@pytest.mark.parametrize("net", NETWORKS)
def test_the_smaller_last_mini_batch_of_an_epoch_is_replayed(net, world, counts):
    """Its 20 images are fewer blocks than 3 ranks, so one rank has no images."""
    step = assert_equal(NETWORKS[net], SOLVERS["decay and clipping"], world, epochs=6)
    assert len(counts) == 2 * 6 - 1 + 6 - 1  # the first mini-batch of each size is eager
    _, smaller = step.programs.values()
    assert smaller.batch.count == 20 and smaller.is_checked


def test_programs_for_smaller_mini_batches_use_the_memory_of_the_largest(world):
    sizes = []

    def store_size(step, iteration):
        sizes.append(step.largest.memory.bytes)

    step, _ = run(world, ReplayedStep, small(), dl.SGDM(0.1), store_size, epochs=4)
    largest, smaller = step.programs.values()
    assert smaller.memory is largest.memory and len(set(sizes)) == 1
    net = step.net.parameters, step.net.state
    for program in largest, smaller:  # both update the arrays of the network
        assert program.is_current() and (step.net.parameters, step.net.state) == net


@pytest.mark.parametrize("iteration", [6, 7, 8, 9, 10, 11, 12, 13])
def test_changes_between_mini_batches_of_two_sizes(iteration, world):
    """Before and after recording both sizes, arrays or settings are replaced on one or all ranks.

    Epochs have three iterations.
    """

    def change(step, current):
        net = step.net
        if current == iteration:
            net.parameters = {name: array * 0.5 for name, array in net.parameters.items()}
        if current == iteration + 3:
            net.state = {name: array + 0.25 for name, array in net.state.items()}
        if current == iteration + 5 and world.rank == 0:
            net.parameters = dict(net.parameters)
        if current == iteration + 7 and world.rank == 0:
            net.fuse = False
        if current == iteration + 8:
            step.optimizer.transforms[-1].momentum = 0.5

    assert_equal(residual, SOLVERS["sgdm"], world, change=change, epochs=9)


def train_on_sizes(step_class, sizes, world):
    """Train on mini-batches of these sizes. Return the losses, a hash of the weights, the step."""
    net, optimizer = small(), dl.SGDM(0.1)
    step = step_class(net, optimizer, "crossentropy", world, 1, None, lambda rate: "")
    losses = []
    for iteration, size in enumerate(sizes, 1):
        ((images, labels),) = MinibatchQueue(pictures(size), size, 0, world).epoch(1)
        info = StepInfo(1, iteration, size, 0.1, 0.0)
        losses += [result.loss for result in step.submit(images, labels, info)]
    return losses, weights_sha256(net), step


def test_mini_batches_of_many_sizes(world):
    """The sizes change, for example, if images are skipped. At most five sizes have programs.

    A program that was never used gives way to a new size.
    """
    sizes = [40, 25, 40, 24, 25, 23, 25, 40, 25, 24, 40, 24, 24, *[22, 21, 20] * 3]
    *expected, _ = train_on_sizes(EagerStep, sizes, world)
    *results_of_replays, step = train_on_sizes(ReplayedStep, sizes, world)
    assert results_of_replays == expected
    assert [size for size, _ in step.programs] == [40, 25, 24, 21, 20]


def test_a_smaller_mini_batch_that_cannot_be_recorded(world, monkeypatch):
    finish = Recorder.finish
    sizes = [40, 40, 25, 25, 25, 24, 24, 40, 40, 24]
    *expected, _ = train_on_sizes(EagerStep, sizes, world)
    programs = []

    def refuse_third(self):
        programs.append(self)
        if len(programs) == 3 and world.rank == world.size - 1:
            self.refuse("the test refuses it")
        return finish(self)

    monkeypatch.setattr(Recorder, "finish", refuse_third)
    *results_of_replays, step = train_on_sizes(ReplayedStep, sizes, world)
    assert results_of_replays == expected and len(programs) == 3
    assert not step.can_replay


def test_trainings_with_mixed_images_replay_steps(world, counts):
    options = {"batch_size": 40, "mixup": 0.4, "label_smoothing": 0.1, "shuffle": "every-epoch"}
    replayed, _ = trained(world, **options)
    assert counts
    counts.clear()
    eager, _ = trained(world, graphs="off", **options)
    assert not counts
    assert weights_sha256(replayed) == weights_sha256(eager)


def test_trainings_replay_parts(world, counts):
    options = {"batch_size": 48, "accumulate": 3, "partial_minibatch": "discard"}
    replayed, _ = trained(world, **options)
    assert len(counts) == 2 * 2 * 3 - 1  # of 12 parts, the first is eager
    eager, _ = trained(world, graphs="off", **options)
    assert len(counts) == 2 * 2 * 3 - 1
    assert weights_sha256(replayed) == weights_sha256(eager)


def test_changes_between_accumulated_steps(world):
    """After a step, arrays of the network or a setting of the optimizer are replaced."""

    def change(step, iteration):
        if iteration == 3:
            weights = step.net.parameters["dense1.weight"]
            step.net.parameters = {**step.net.parameters, "dense1.weight": weights * 0.5}
            step.net.state = {name: a + 0.25 for name, a in step.net.state.items()}
        if iteration == 5:
            step.optimizer.transforms[-1].momentum = 0.5

    assert_equal(small, SOLVERS["sgdm"], world, change=change, batch=48, parts=3)


@pytest.mark.parametrize("net", ["alexnet", "mobilenet_v2", "resnet18", "squeezenet1_1"])
@pytest.mark.slow("ranks")
def test_networks_of_the_zoo_are_recorded(net, world):
    shape, classes = (3, 67, 67), 3
    images = numbers("zoo", 24, *shape, low=0, high=200).astype(np.uint8)
    store = dl.ArrayDatastore(images, np.arange(24) % classes)
    create = functools.partial(getattr(zoo, net), shape, classes)
    arguments = {"store": store, "batch": 20, "epochs": 3}
    assert is_replayed(assert_equal(create, SOLVERS["sgdm"], world, **arguments))


@pytest.fixture
def stale_samples(monkeypatch):
    """Make replays wrong: they reuse the dropout mask of the recorded mini-batch."""

    def samples(self, batch):
        samples = np.zeros(batch.blocks * 16, np.int64)
        samples[: len(batch.indices)] = batch.indices
        return batch.epoch, samples

    monkeypatch.setattr(cpu_step.StepProgram, "samples", samples)


def test_a_program_that_misses_an_input_is_not_used(world, stale_samples, capfd):
    assert not assert_equal(residual, SOLVERS["sgdm"], world).can_replay
    text = capfd.readouterr().err
    assert ("replayed and eager training steps differ" in text) == (world.rank == 0)


def test_without_the_check_a_faulty_program_is_used(world, stale_samples, monkeypatch):
    monkeypatch.setattr(cpu_step, "digest", lambda *results: b"")
    with pytest.raises(AssertionError):
        assert_equal(residual, SOLVERS["sgdm"], world)


@pytest.mark.parametrize("parts", [1, 3])
def test_ranks_that_replay_work_with_ranks_that_do_not(parts, world):
    if world.rank == 0:
        phases.store_spans(10_000)  # steps whose spans are stored run eagerly
    try:
        step = assert_equal(small, SOLVERS["sgdm"], world, parts=parts)
        assert step.largest.is_checked
    finally:
        phases.take_spans()


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_replay_ends_before_the_update_if_the_loss_is_not_finite(is_guarded, world, monkeypatch):
    if not is_guarded:  # the negative control
        monkeypatch.setattr(Recorder, "need_finite", lambda self, loss: True)
    step, _ = run(world, ReplayedStep, small(), dl.SGDM(0.1), epochs=2)
    ((images, labels), *_) = MinibatchQueue(pictures(100), 40, 0, world).epoch(3)
    step.net.parameters["dense1.weight"][0] = np.nan
    before = {name: array.tobytes() for name, array in results(step.net, step.optimizer).items()}
    steps = step.optimizer.steps
    (loss, *_), is_updated = step.largest.step(images, labels)
    after = {name: array.tobytes() for name, array in results(step.net, step.optimizer).items()}
    assert np.isnan(loss)
    assert (not is_updated, after == before, step.optimizer.steps == steps) == (is_guarded,) * 3


def test_changes_between_steps_are_noticed(world):
    def change(step, iteration):
        if iteration == 4:
            step.net.parameters = {k: v * 0.5 for k, v in step.net.parameters.items()}
        if iteration == 6:
            step.net.layers[1].decay = 0.5
        if iteration == 7:
            step.optimizer.transforms[-1].momentum = 0.5

    step = assert_equal(small, SOLVERS["sgdm"], world, change=change)
    assert step.largest is not None


def test_changes_of_the_precision_are_noticed(world, monkeypatch):
    monkeypatch.setattr(settings, "precision", "fp32")

    def change(step, iteration):
        dl.configure(precision="bf16" if 4 <= iteration < 9 else "fp32")

    step = assert_equal(small, SOLVERS["sgdm"], world, change=change, epochs=5)
    assert is_replayed(step) and step.largest.is_current()
    dl.configure(precision="bf16")
    assert not step.largest.is_current()


def test_changes_of_the_decay_and_a_new_average_are_noticed(world):
    def change(step, iteration):
        if iteration == 4:
            step.optimizer.transforms[0].factors["conv1.weight"] = 5.0
        if iteration == 6:
            step.optimizer.keep_average()
            step.optimizer.average_share = 1.0

    assert_equal(small, SOLVERS["decay and clipping"], world, change=change)


def halved(step):
    step.net.parameters = {k: v * 0.5 for k, v in step.net.parameters.items()}
    step.optimizer.state_arrays["velocity"] = {
        k: v * 0.5 for k, v in step.optimizer.state_arrays["velocity"].items()
    }


def swapped(step):
    arrays = step.net.parameters
    arrays["batchnorm1.gamma"], arrays["batchnorm1.beta"] = (
        arrays["batchnorm1.beta"],
        arrays["batchnorm1.gamma"],
    )


def decayed(step):
    step.net.layers[1].decay = 0.5


# Changes before the recording is checked, within an epoch, and at the end of an epoch.
@pytest.mark.parametrize("iteration", [1, 4, 6])
@pytest.mark.parametrize("change", [halved, swapped, decayed])
def test_a_change_on_one_rank_alone(change, iteration, world):
    """If only one rank recorded again, it would wait for the others, and the job would hang."""

    def change_on_last_rank(step, number):
        if number == iteration and world.rank == world.size - 1:
            change(step)

    step = assert_equal(small, SOLVERS["sgdm"], world, change=change_on_last_rank, epochs=4)
    assert is_replayed(step) and step.largest.is_current()


def test_the_memory_of_a_closed_step_is_freed(world):
    step, _ = run(world, ReplayedStep, small(), dl.SGDM(0.1))
    memory = weakref.ref(step.largest.memory)
    step.close()
    del step
    gc.collect()
    assert memory() is None


def test_observers_get_the_gradients(world):
    gradients = {EagerStep: [], ReplayedStep: []}
    for step_class, copies in gradients.items():

        def observe(step, iteration, copies=copies):
            if iteration == 1:
                step.observe_gradients(
                    lambda g: copies.append({k: v.tobytes() for k, v in g.items()})
                )

        run(world, step_class, small(), dl.SGDM(0.1), observe)
    assert len(gradients[EagerStep]) == 8
    assert gradients[EagerStep] == gradients[ReplayedStep]


def test_arrays_that_others_hold_do_not_change(world):
    net = small()
    arrays = net.parameters
    before = {name: array.tobytes() for name, array in arrays.items()}
    run(world, ReplayedStep, net, dl.SGDM(0.1))
    assert {name: array.tobytes() for name, array in arrays.items()} == before


def test_trainings_replay_steps(world, counts):
    recorded, _ = trained(world)
    assert len(counts) == 4  # of 4 full and 2 smaller mini-batches, the first ones are eager
    eager, _ = trained(world, graphs="off")
    assert len(counts) == 4
    assert weights_sha256(recorded) == weights_sha256(eager)


# Iteration 4 is replayed with its update, and iteration 6 has fewer images.
@pytest.mark.parametrize("parts, last", [(1, 3), (1, 5), (3, 5)])
def test_a_loss_that_is_not_finite_leaves_the_arrays(parts, last, world):
    net, error = small(), None

    def explode(step, iteration):
        if iteration == last:
            step.net.parameters["dense1.weight"][...] = np.inf
        explode.before = {k: v.tobytes() for k, v in results(net, step.optimizer).items()}
        explode.optimizer = step.optimizer

    try:
        with np.errstate(all="ignore"):
            run(world, ReplayedStep, net, dl.SGDM(0.1), explode, parts=parts)
    except dl.errors.NotFinite as fault:
        error = fault
    assert f"iteration {last + 1}" in error.description
    after = {k: v.tobytes() for k, v in results(net, explode.optimizer).items()}
    assert after == explode.before


@dataclasses.dataclass
class Doubled(dl.ReLU):
    """A user's layer, whose Python code must run in each step."""

    def forward(self, x, context):
        return super().forward(x, context) * 2.0


def test_custom_parts_stay_eager():
    options, sgdm = dl.TrainingOptions(), dl.SGDM(0.1)
    is_recordable = functools.partial(cpu_step.is_recordable, small(), sgdm)
    assert is_recordable("mse", options) and is_recordable(dl.CrossEntropy(), options)
    assert is_recordable(dl.CrossEntropy(label_smoothing=0.1), options)
    for loss in (dl.CrossEntropy([1, 2, 3]), dl.CrossEntropy(ignore_label=5), lambda *values: 0):
        assert not is_recordable(loss, options)
    for other in ({"graphs": "off"}, {"batchnorm": "local"}, {"worker_load": "measured"}):
        assert not is_recordable("mse", dataclasses.replace(options, **other))
    assert not cpu_step.is_recordable(small(), lambda p, g: p, "mse", options)
    assert not cpu_step.is_recordable(small(Doubled()), sgdm, "mse", options)


class Halved(dl.ReLU):
    """A user's layer that computes in NumPy."""

    def forward(self, x, context):
        return halve(super().forward(x, context))


@dl.op(blocks=True)
def halve(x):
    def vjp(dy, needs):
        halve.types |= {x.lanes.dtype, x.local().dtype, dy.lanes.dtype, dy.local().dtype}
        return (x.like(dy.lanes * np.float32(0.5)),)

    return x.like(x.lanes * np.float32(0.5)), vjp


def test_custom_layers_compute_in_float32(world):
    """In bf16, NumPy code gets float32 numbers, and its cotangents are stored like its input."""
    hashes = {}
    for precision in ("fp32", "bf16"):
        halve.types = set()
        nets = [small(layer, dl.Conv2D(3, 5)) for layer in (Halved(), dl.HardSwish())]
        for net in nets:
            trained(world, net, precision=precision)
        hashes[precision] = [weights_sha256(net) for net in nets]
        assert halve.types == {np.dtype(np.float32)}
    assert len({*hashes["fp32"], *hashes["bf16"]}) == 4


def test_what_numpy_computes_stays_eager(world):
    def net():
        return small(dl.PReLU())  # NumPy sums the gradient of the slopes

    assert not assert_equal(net, SOLVERS["sgdm"], world).can_replay
