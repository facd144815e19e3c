"""The arithmetic of the benchmarks: their counts, comparisons and reports, never their times."""

import json
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from limits import wait_until
from single_rank import SingleRank, blocked, numbers

import mpidl as dl
from benchmarks import (
    accuracy,
    arguments,
    compare,
    fold,
    kernels,
    machine,
    memory,
    mpidl_step,
    optimizers,
    report,
    subject,
    torch_step,
    turns,
)
from mpidl.data import PackedDatastore
from mpidl.errors import Fault, UserError
from mpidl.nn import zoo

LAYERS = [
    *(dl.Conv2D(3, 8, padding=1), dl.BatchNorm(), dl.ReLU(), dl.MaxPool2D(3, stride=2, padding=1)),
    *(dl.Conv2D(3, 8), dl.BatchNorm(), dl.ReLU(), dl.AveragePool2D(2), dl.Dense(10)),
]


def small():
    net = dl.Network(LAYERS, (2, 9, 9), seed=1)
    return net, *subject.mini_batch(net.input_shape, 24, seed=1)


def refused(line):
    with pytest.raises(UserError) as error:
        arguments.parse(line.split())
    return str(error.value)


def test_arguments():
    options = arguments.parse("fold --rounds 2 --batch-size 64 --ranks 1,2".split())
    assert (options.command, options.rounds, options.batch_size, options.ranks) == (
        "fold",
        2,
        64,
        [1, 2],
    )
    options = arguments.parse("compare --image 3x8x8 --variants eager,compile".split())
    assert (options.image, options.variants, options.libraries) == (
        [3, 8, 8],
        ["eager", "compile"],
        [],
    )
    assert (options.threads, options.ranks, options.seed, options.json) == (1, 1, 0, None)
    assert "--rounds must be" in refused("fold --rounds 0")
    assert "did you mean channels_last?" in refused("compare --variants eager,chanels_last")
    assert "--image must be CxHxW" in refused("step --image 28x28")
    assert "--held-to must be of avx2" in refused("compare --held-to sse")
    assert "unknown option --ranks" in refused("kernels --ranks 2")


def test_a_mini_batch_depends_on_the_seed_alone():
    images, labels = subject.mini_batch((1, 4, 4), 20, seed=3)
    assert images.shape == (20, 1, 4, 4) and images.dtype == np.float32
    assert 0 <= images.min() < images.max() < 1 and set(labels) <= set(range(10))
    for a, b in zip((images, labels), subject.mini_batch((1, 4, 4), 20, seed=3), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(images, subject.mini_batch((1, 4, 4), 20, seed=4)[0])


def test_networks_by_name_have_their_own_images():
    assert subject.network("digits").input_shape == (1, 28, 28)
    assert subject.network("cifar").input_shape == (3, 32, 32)
    assert subject.network("digits", [3, 16, 16]).input_shape == (3, 16, 16)


def test_a_step_learns_and_begins_again(world):
    net, *batch = small()
    step = mpidl_step.EagerStep(net, batch, world)
    first = [step() for _ in range(4)]
    assert first[-1] < first[0]
    assert {len(seconds) for seconds in vars(step.times).values()} <= {0, 4}
    step.reset()
    assert [step() for _ in range(4)] == first


def test_a_step_is_that_of_the_library(world):
    """The weights equal those of the calls that a user makes."""
    net, *batch = small()
    step = mpidl_step.EagerStep(net, batch, world)
    for _ in range(2):
        step()
    other, *arrays = small()
    x, y = blocked(world, *arrays)
    sgdm = dl.SGDM(learning_rate=0.01, momentum=0.9)
    for _ in range(2):
        _, gradients, other.state = dl.value_and_grad(
            lambda net, x, y: dl.softmax_cross_entropy(net(x), y)
        )(other, x, y)
        other.parameters = sgdm(other.parameters, world.gplus(gradients))
    assert dl.weights_sha256(net) == dl.weights_sha256(other)


def test_who_gets_which_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7})
    assert machine.cores_of(2, 2) == [[4, 5], [6, 7]]
    assert machine.cores_of(3, 2) == [[4, 5], [6, 7], [4, 5]]


def test_a_json_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    report.prepare_json(None)
    report.prepare_json(str(tmp_path / "new.json"))
    with pytest.raises(UserError, match="--json"):
        report.prepare_json(str(tmp_path / "missing" / "new.json"))
    report.write_json(str(tmp_path / "new.json"), {"a": np.float32(0.5), "b": np.arange(2)})
    assert json.loads((tmp_path / "new.json").read_text()) == {"a": 0.5, "b": [0, 1]}


def test_the_peak_of_memory_that_was_freed_again():
    before = machine.start_of_peak()
    pixels = np.ones(8 << 20, np.float32)
    del pixels
    assert 30 << 20 < machine.peak() - before < 64 << 20


def test_how_many_steps_make_a_turn():
    assert [turns.steps_for(s) for s in (10.0, 0.1, 0.05, 1e-6, 0.0)] == [1, 2, 5, 50, 50]


def test_the_ratio_is_the_fastest_variant_over_ours(capsys):
    options = arguments.parse(["compare"])
    times = {"eager": [(2.0, 6.0), (2.2, 6.6), (1.8, 9.0)], "compile": [(2.0, 5.0)] * 3}
    losses = {"ours": [2.0, 1.0], "eager": [2.0, 1.0], "compile": [2.002, 1.5]}
    figures = compare.evaluate(options, times, losses)
    assert (figures["best_variant"], figures["ours_ms"]) == ("compile", 2000.0)
    assert figures["torch_ms"] == {"eager": 6600.0, "compile": 5000.0} and figures["ratio"] == 2.5
    assert figures["loss_difference"] == pytest.approx(1e-3)
    assert "ratio 2.50" in capsys.readouterr().out


# a bit of everything that PyTorch has, too
BRANCHES = [
    dl.Conv2D(5, 8, stride=2, padding="same", name="first"),
    dl.ReLU(name="a"),
    dl.CrossChannelNorm(5, alpha=1e-2),
    dl.Conv2D(3, 8, padding=(1, 2), groups=2, dilation=(1, 2)),
    dl.BatchNorm(),
    dl.MaxPool2D((2, 3), stride=1, padding="same", name="b"),
    dl.Add(inputs=("a", "b"), name="sum"),
    dl.AveragePool2D(2, stride=1, padding="same"),
    dl.LeakyReLU(0.1),
    dl.MaxPool2D(3, stride=3, padding=((2, 1), (0, 2)), name="c"),
    dl.Conv2D(1, 4, after="sum"),
    dl.Tanh(),
    dl.GELU(),
    dl.Dropout(0.0),
    dl.MaxPool2D(3, stride=3, padding=((2, 1), (0, 2)), name="d"),
    dl.ReLU(after="sum"),  # which others read, too
    dl.MaxPool2D(3, stride=3, padding=(2, 1), name="e"),  # more than half of a window
    dl.Concat(inputs=("c", "d", "e")),
    dl.Dense(16),
    dl.Sigmoid(),
    dl.GELU("tanh"),
    dl.Dense(10),
]


@pytest.mark.parametrize("name", ["branches", "resnet"])
def test_pytorch_computes_the_same_of_a_network_with_branches(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if name == "resnet":
        net = zoo.resnet((3, 8, 8))
    else:
        net = dl.Network(BRANCHES, (2, 13, 10), seed=1)
    images, labels = subject.mini_batch(net.input_shape, 20, seed=1)
    batch = dl.share(20, dl.OneRank())
    x, y = dl.from_images(images, batch), dl.from_images(labels, batch, np.int32)
    loss, gradients, _ = dl.value_and_grad(mpidl_step.mean_loss)(net, x, y)
    model = torch_step.build_module(net).train()
    torch_loss = torch_step.cross_entropy(model(torch.from_numpy(images)), torch.tensor(labels))
    torch_loss.backward()
    assert float(batch.world.gplus(loss)) == pytest.approx(torch_loss.item(), rel=1e-5)
    gradients = batch.world.gplus(gradients)
    largest = max(np.abs(g).max() for g in gradients.values())
    learnables = dict(torch_step.named_learnables(model))
    assert set(learnables) == set(gradients)
    for key, gradient in gradients.items():
        assert np.abs(gradient - learnables[key].grad.numpy()).max() < 1e-3 * largest, key


def test_layers_that_pytorch_has_not():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    for layer in (dl.TransposedConv2D(2, 2), dl.CrossChannelNorm(4)):
        with pytest.raises(UserError, match="has no counterpart in PyTorch here"):
            torch_step.build_module(dl.Network([layer], (2, 5, 5)))


def test_comparisons_drop_nothing(monkeypatch):
    monkeypatch.setattr(
        subject.start,
        "network",
        lambda name, image, classes, seed: dl.Network([dl.Dropout(0.5), dl.Dense(2)], (1, 2, 2)),
    )
    assert subject.network("any").layers[0].probability == 0.5
    assert subject.network("any", dropout=False).layers[0].probability == 0.0


def test_optimizers_that_do_not_make_the_same_steps_are_no_comparison():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    kind, name, options, implementations = optimizers.PAIRS["adam"]
    for implementation in implementations:
        side = optimizers.torch_optimizer(name, options | {implementation: True}, 99)
        times = optimizers.compare(optimizers.our_optimizer(kind(), 99), side, 2)
        assert [len(t) for t in times] == [2, 2]
    with pytest.raises(Fault, match="after 3 steps the weights are .* apart"):
        optimizers.compare(optimizers.our_optimizer(kind(0.01), 99), side, 2)


def test_the_overhead_is_paired_by_rounds():
    times = {"fold": [1.1, 2.2, 3.0], "plain": [1.0, 2.0, 3.0], "again": [1.1, 1.1, 3.3]}
    figures = fold._figures({2: {kind: np.array(values) for kind, values in times.items()}})
    assert figures["overhead"] == {"2": pytest.approx(0.1)}
    assert figures["control"] == {"2": pytest.approx(0.0)}


def test_the_operations_that_kernels_counts():
    options = arguments.parse(["kernels", "--batch-size", "32"])
    cases = {(c.layer, c.name): c for c in kernels.cases("digits", options)}
    pixels = 24 * 24 * 32
    assert cases["digits/conv1", "forward"].flops == 2 * 25 * 20 * pixels
    assert cases["digits/conv2", "dx"].flops == 2 * 9 * 20 * 20 * pixels
    assert cases["digits/conv2", "dweight"].flops == 2 * 9 * 20 * 20 * pixels
    assert ("digits/conv1", "dx") not in cases  # which no step computes
    assert cases["digits/dense1", "forward"].flops == 2 * 11520 * 10 * 32
    assert cases["digits/dense1", "backward"].flops == 4 * 11520 * 10 * 32
    assert cases["digits/relu1", "forward"].bytes == 2 * 4 * 20 * pixels
    assert cases["digits/conv2", "dx"].shape == cases["digits/conv3", "dx"].shape
    for case in cases.values():
        assert bool(case.flops) != bool(case.bytes)
        case.run()
    shapes = {c.layer for c in kernels.cases("shapes", options)}
    assert shapes == {"20 at 24x24", "32 at 32x32", "64 at 16x16", "128 at 8x8"}


@pytest.mark.slow("jobs")
def test_the_large_layer_beside_blas():
    """BLAS computes the same product as the case, of all images."""
    options = arguments.parse(["kernels", "--batch-size", "64"])
    cases = list(kernels.cases("dense", options))
    assert [case.name for case in cases] == ["forward", "dx", "dweight"]
    for case in cases:
        assert (case.layer, case.flops) == ("9216 to 4096", 2 * 9216 * 4096 * 32)
        ours, product = case.run(), case.sgemm()
        if case.name == "dweight":
            ours = SingleRank().gplus(ours)
        else:
            ours = ours.swapaxes(0, 1).reshape(product.shape)
        assert np.abs(ours - product).max() < 1e-5 * np.abs(product).max()
    both = [case._replace(run=lambda: None) for case in cases]
    figures = kernels.measure(both[0], kernels.Yardsticks(1), 3)
    assert set(figures) == {"ms", "gflops", "share_of_peak", "sgemm_ratio"}
    assert figures["sgemm_ratio"] < 0.01  # nothing takes less time than a product
    row = dict(zip(kernels.HEAD, kernels.table_row(both[0], figures), strict=True))
    assert row["time / sgemm"] == "0.00" and row["GB/s"] == ""
    options.threads = 2
    assert all(case.sgemm is None for case in kernels.cases("dense", options))


def test_a_case_is_measured_against_its_yardstick():
    options = arguments.parse(["kernels", "--batch-size", "16"])
    yardsticks = kernels.Yardsticks(1)
    case = next(kernels.cases("digits", options))
    figures = kernels.measure(case._replace(run=lambda: None), yardsticks, 3)
    assert set(figures) == {"ms", "gflops", "share_of_peak"}
    peak, copy = yardsticks.medians()
    assert copy is None and (peak is None) == (yardsticks.kernels is None)


def test_every_layer_is_on_the_tape():
    """Names and values are those of the layers, whether they run as one op or one by one."""
    net, images, labels = small()
    fused, _ = accuracy.our_step(net, images, labels)
    net.fuse = False
    single, _ = accuracy.our_step(net, images, labels)
    layers = [layer.name for layer in net.layers]
    assert [name for name in single if "." not in name] == layers
    assert {name for name in fused if "." in name} == set(net.parameters)
    for name, value in fused.items():
        if name not in ("conv1.bias", "conv2.bias"):  # zero but for rounding
            assert np.abs(value - single[name]).max() < 1e-4 * np.abs(single[name]).max(), name


def test_decisions_of_the_step_itself_change_nothing():
    net, images, labels = small()
    exact = dl.Network(net.layers, net.input_shape)
    exact.parameters = {k: v.astype(np.float64) for k, v in net.parameters.items()}
    free, activations = accuracy.our_step(exact, images.astype(np.float64), labels)
    decided = accuracy.exact_step(
        net, images, labels, accuracy.decide(net, images.astype(np.float64), activations)
    )
    for name, value in free.items():
        assert np.abs(value - decided[name]).max() <= 1e-12 * max(1, np.abs(value).max()), name


def test_errors_are_seen_and_zeros_left_out():
    net, images, labels = small()
    ours, activations = accuracy.our_step(net, images, labels)
    exact = accuracy.exact_step(net, images, labels, accuracy.decide(net, images, activations))
    errors = accuracy.errors(ours, exact)
    assert set(accuracy.zero_gradients(exact)) == {"conv1.bias", "conv2.bias"}
    assert set(errors) == set(ours) - {"conv1.bias", "conv2.bias"}
    assert max(norm for norm, _ in errors.values()) < 2e-5
    altered = ours | {"conv2.weight": ours["conv2.weight"] * np.float32(1.001)}
    norm, largest = accuracy.errors(altered, exact)["conv2.weight"]
    assert norm == pytest.approx(1e-3, rel=0.02) and largest == pytest.approx(1e-3, rel=0.02)


def test_one_other_decision_is_seen():
    """Negative control: without the decisions of the compared step the errors are large."""
    net, images, labels = small()
    ours, activations = accuracy.our_step(net, images, labels)
    decisions = accuracy.decide(net, images, activations)
    flipped = decisions["relu2"].copy()
    flipped.flat[0] ^= True
    exact = accuracy.exact_step(net, images, labels, decisions | {"relu2": flipped})
    assert accuracy.errors(ours, exact)["conv2.weight"][0] > 1e-4


@pytest.mark.parametrize(("size", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (2, 1, 1)])
def test_a_maximum_decided_beforehand(size, stride, padding):
    pixels = numbers("decided", 18, 3, 7, 6)
    share = dl.share(18, dl.OneRank())
    x = dl.from_images(pixels, share)
    net = dl.Network([dl.MaxPool2D(size, stride=stride, padding=padding)], (3, 7, 6))
    positions = accuracy.decide(net, pixels, {})["maxpool1"]
    args = ((size, size), (stride, stride), ((padding, padding),) * 2)
    expected = dl.max_pool2d(x, size, stride=stride, padding=padding)
    y = accuracy.decided_max(x, positions=positions, args=args)
    assert np.array_equal(y.local(), expected.local())
    dl.check_vjp(lambda x: accuracy.decided_max(x, positions=positions, args=args), x)


def test_peaks_beyond_those_on_one_mini_batch(monkeypatch, capsys):
    options = arguments.parse("input --memory --batch-size 8 --ranks 2 --side 4".split())
    assert (options.memory, options.gigabytes, options.cache_mb, options.ranks) == (
        True,
        4,
        256,
        [2],
    )
    assert memory.images_in(4 * 10**9, 227) == 25875 and memory.images_in(1, 227) == 1
    runs = {}

    def train_peak(options, ranks, data, steps, folder):
        count = len(PackedDatastore(data))
        runs[count] = ranks, steps
        return memory.MemoryUse((count - 1) << 20, 1 << 19)

    monkeypatch.setattr(memory, "train_peak", train_peak)
    options.gigabytes, options.busy = 48 * 10 / 1e9, 0.0
    mib = memory.run(options)["mib"]["2"]
    assert runs == {10: (2, memory.CUT_STEPS), 8: (2, memory.CUT_STEPS)}
    assert mib["whole"] == {"anonymous": 9, "shared": 0.5} and mib["beyond"] == 2
    assert "beyond it 2.0 MiB, 2.1 MB" in capsys.readouterr().out


def test_the_memory_of_processes():
    """It counts RssAnon of each, shared memory once, and nothing of ended processes."""
    code = "import numpy, sys; a = numpy.ones(4 << 20); print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as job:
        job.stdout.readline()
        child = memory.memory_of([job.pid])
        shared = mmap.mmap(-1, 8 << 20)  # of this process and its children
        shared.write(bytes(8 << 20))
        before, both = memory.memory_of([os.getpid()]), memory.memory_of([os.getpid(), job.pid])
        assert 32 << 20 <= child.anonymous < 64 << 20 and child.shared == 0
        assert before.shared >= 8 << 20 and both.shared - before.shared < 1 << 20
        assert both.anonymous - before.anonymous >= 32 << 20
        job.stdin.close()
    assert memory.memory_of([job.pid]) == memory.MemoryUse()


def test_ranks_are_found_below_their_launcher():
    """The launcher's variables tell each rank once, whatever processes it starts."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    start = f"import subprocess as s, sys; p = [s.Popen([sys.executable, '-c', {code!r}], env={{"
    start += "'PMI_RANK': str(r)}) for r in range(2)]; print(flush=True); [x.wait() for x in p]"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", start], **pipes) as job:
        job.stdout.readline()
        wait_until(lambda: len(memory.ranks_below(job.pid)) == 2)
        assert job.pid not in memory.ranks_below(job.pid)
        job.stdin.close()
    assert memory.ranks_below(job.pid) == []
