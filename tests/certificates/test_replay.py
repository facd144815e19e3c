"""Test replays of runs of Python programs: rollbacks, stops, changed options, custom objects."""

import shutil
from pathlib import Path

import certificate_files
import numpy as np
import pytest
from short_training import pictures, small

import mpidl as dl
from mpidl.certificates import certificate, replay, settings
from mpidl.errors import UserError
from mpidl.training import golden
from mpidl.training.files import model_file
from mpidl.training.options.training_options import OPTIONS

pytestmark = pytest.mark.usefixtures("without_plots", "machine")
SLOW_ON_RANKS = pytest.mark.slow_on_ranks


@pytest.fixture
def machine(monkeypatch):
    """Let the golden hashes agree at once, because their trainings take seconds."""
    monkeypatch.setattr(golden, "check", lambda: [])


@pytest.fixture
def out(world, tmp_path):
    """A folder that all ranks use."""
    return Path(world.broadcast(str(tmp_path))) / "run"


def options_of(**options):
    common = {"epochs": 4, "batch_size": 40, "verbose": "off"}
    return dl.TrainingOptions(
        **common | {"certify": "public", "certify_every": 2, "checkpoint_keep": 4} | options
    )


def train(world, out, net=None, store=None, **options):
    """Train a certified run, and return its network and its certificate."""
    names = ("hooks", "optimizer", "resume")
    keywords = {name: options.pop(name) for name in names if name in options}
    net = small() if net is None else net
    store = pictures(100) if store is None else store
    dl.train(net, store, options_of(**options), world=world, out=str(out), **keywords)
    world.barrier()  # all files are written
    return net, certificate.read(out)


def audit(world, out, store=None, options=None, **keywords):
    """Audit a run that began with `small()`, unless `net` is another network."""
    keywords = {"net": small()} | keywords
    store = pictures(100) if store is None else store
    return dl.audit(str(out), store, options, world=world, **keywords)


def verdicts(result):
    return {finding.subject: finding.verdict for finding in result.findings}


def text_of(result, subject):
    return next(f.text for f in result.findings if f.subject == subject)


def assert_equal(result, last):
    """Assert that an audit agrees with a run, up to its last iteration."""
    assert result.is_equal and not result.differing, str(result)
    segments = [f.subject for f in result.findings if f.subject.startswith("iterations")]
    assert segments and segments[-1].endswith(f"-{last}")
    assert result.conclusion.startswith("equal: ") and str(result).endswith(result.conclusion)


def test_a_run_of_a_program(world, out):
    net, _ = train(world, out)
    assert_equal(audit(world, out), 12)
    other = dl.Network.from_spec(net.spec(), net.input_shape, seed=2)
    result = audit(world, out, net=other)  # the replay starts from the checkpoint of iteration 0
    assert result.differing == ["initial weights"] and verdicts(result)["iterations 0-4"] == "equal"
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(out / "checkpoints")
    world.barrier()
    result = audit(world, out, net=other)
    assert result.differing == ["initial weights", "iterations 0-9"]
    assert text_of(result, "iterations 0-9").endswith("; cause: the initial weights")
    assert verdicts(result)["iterations 9-12"] == "equal"
    result = audit(world, out, net=small(dl.Dense(4)))
    assert result.differing[0] == "network" and not result.is_equal
    result = audit(world, out, store=pictures(100, "other"))
    assert result.differing == ["data"] and verdicts(result)["iterations"] == "unchecked"
    assert verdicts(dl.audit(str(out), world=world)).keys() >= {"certificate", "checkpoints"}


@SLOW_ON_RANKS
def test_the_seed_gives_the_network(world, out):
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.Dropout(0.2), dl.Dense(3)]
    train(world, out, net=dl.Network(layers, (1, 6, 6), seed=5), seed=5)
    result = audit(world, out, net=None)
    assert_equal(result, 12)
    assert text_of(result, "initial weights") == "from the seed 5"


@SLOW_ON_RANKS
def test_sampled_segments(world, out):
    train(world, out, checkpoint_keep=2)
    results = [audit(world, out, sample=2, seed=seed) for seed in (0, 1, 2, 0)]
    names = [[f.subject for f in r.findings if f.subject[:5] == "itera"] for r in results]
    assert names[0] == names[3] and all(len(drawn) in (2, 3) for drawn in names)
    assert all(drawn[-1] == "iterations 10-12" for drawn in names)
    assert all(result.is_equal for result in results)
    new = audit(world, out, sample=2)
    text = world.gather(text_of(new, "sample"))
    assert text is None or len(set(text)) == 1  # all ranks drew the same segments
    result = audit(world, out, steps=(5, 5))
    assert [f.subject for f in result.findings][-2:] == ["iterations 4-6", "results"]
    assert "2 of 12 iterations were replayed; unchecked: " in result.conclusion


class Jump:
    """A hook that adds numbers to the weights after an iteration."""

    def __init__(self, iteration):
        self.jump_iteration = iteration

    def step(self, trainer):
        if trainer.position.iteration == self.jump_iteration:
            weight = np.array(trainer.net.parameters["dense1.weight"])
            trainer.net.parameters["dense1.weight"] = weight + np.float32(3)


@pytest.mark.parametrize("options", [{}, {"learn_rate_schedule": "cosine", "epochs": 6}])
def test_a_jump_is_in_the_segment_with_the_largest_distance(world, out, options):
    train(world, out, hooks=[Jump(5)], **options)
    result = audit(world, out, largest=1)
    assert text_of(result, "largest").startswith("1 of ")
    assert result.differing == ["iterations 4-8"]
    text = text_of(result, "iterations 4-8")
    assert text.startswith("from iteration 6 on: the loss is ")
    assert text.endswith(", or the hooks of the run changed it")
    names = [f.subject for f in result.findings if f.subject.startswith("iterations")]
    assert len(names) == 3  # the others are the one before, and the last
    assert verdicts(audit(world, out, largest=9))["iterations 0-4"] == "equal"


def diverging_pictures():
    images = np.random.default_rng(0).integers(0, 256, (32, 1, 4, 4), dtype=np.uint8)
    return dl.ArrayDatastore(images, targets=(images.mean((1, 2, 3)) / 255).astype(np.float32))


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"checkpoint_every": 5, "checkpoint_keep": 10}, marks=SLOW_ON_RANKS)],
)
def test_rollbacks(world, out, options):
    """A rate that is too high makes the loss infinite. The replay rolls back as the run did."""
    store, net = diverging_pictures(), dl.Network([dl.Dense(1)], (1, 4, 4), seed=0)
    options = {"checkpoint_keep": 0, **options, "on_nan": "rollback", "learning_rate": 0.8}
    options |= {"loss": "mse", "momentum": 0.0, "batch_size": 16, "epochs": 30}
    _, document = train(world, out, net=net, store=store, **options)
    counts = {link["iteration"]: link["rollbacks"] for link in document.of_kind("state")}
    before, after = min((i for i in counts if counts[i]), default=0), counts[60]
    assert after and before > 20
    assert_equal(audit(world, out, store=store, net=None), 60)
    last = max(i for i in counts if not counts[i])
    result = audit(world, out, store=store, net=None, steps=(last, before))
    assert_equal(result, before)
    # Forgeries: a run without rollbacks, and one with a rollback that there was not.
    for iteration, count in ((before, 0), (last, after)):

        def change(predicate, iteration=iteration, count=count):
            for link in predicate["chain"]:
                if link["kind"] == "state" and link["iteration"] >= iteration:
                    link["rollbacks"] = count

        if world.rank == 0:
            shutil.copy(out / "certificate.json", out / "certificate.bak")
            certificate_files.forge(out / "certificate.json", change)
        world.barrier()
        result = audit(world, out, store=store, net=None, steps=(0, before))
        (segment,) = [n for n in result.differing if n.startswith("iterations")]
        assert "rolled back" in text_of(result, segment)
        world.barrier()
        if world.rank == 0:
            shutil.copy(out / "certificate.bak", out / "certificate.json")
        world.barrier()


def stop_after_7(progress):
    return progress.state == "iteration" and progress.iteration == 7


@SLOW_ON_RANKS
def test_a_run_that_an_output_function_stopped(world, out):
    _, document = train(world, out, output_functions=stop_after_7, average="ema")
    assert document.end["stopped"] == "output_function" and document.end["iteration"] == 7
    result = audit(world, out)
    assert_equal(result, 7)
    assert text_of(result, "hooks") == "the run had test_replay.stop_after_7"


@SLOW_ON_RANKS
def test_a_run_that_ended_by_its_validations(world, out):
    options = {"validation": pictures(40, "validation"), "validation_frequency": 2}
    options |= {"validation_patience": 1, "learning_rate": 1.0}
    options |= {"output_network": "best-validation", "epochs": 20}
    _, document = train(world, out, **options)
    end = document.end
    assert end["stopped"] == "validation_patience" and end["iteration"] > end["returned_iteration"]
    result = audit(world, out, options=options_of(**options))
    assert_equal(result, end["iteration"])
    assert result.findings[-1].subject.startswith("iterations")
    changed = options_of(**options | {"validation": pictures(40, "other")})
    assert audit(world, out, options=changed).differing == ["data"]
    longer = options_of(**options | {"validation_patience": 7})
    assert "options" in audit(world, out, options=longer).differing


@SLOW_ON_RANKS
def test_the_best_network_in_a_checkpoint(world, out):
    """A forged best network is found before a replay would return it."""
    options = {"validation": pictures(40, "validation"), "validation_frequency": 2}
    options = options_of(**options, output_network="best-validation", learning_rate=0.3)
    dl.train(small(), pictures(100), options, world=world, out=str(out))
    assert_equal(audit(world, out, options=options), 12)
    path = out / "checkpoints" / "00000008.h5"
    if world.rank == 0:
        arrays, attributes = model_file.read(path)
        arrays["best_learnables"]["dense1.weight"][0] += 1
        for key in ("format", "format_version"):
            del attributes[key]
        path.unlink()
        path.write_bytes(model_file.pack(arrays, attributes))
    world.barrier()
    result = audit(world, out, options=options, steps=(9, 12))
    assert result.differing == ["checkpoints"]
    expected = f"{path}: best_learnables differ from the state of iteration 8"
    assert text_of(result, "checkpoints") == expected


def test_options_that_a_resumed_run_has_changed(world, out):
    """The replay changes the options where the run did, even between two states."""
    train(world, out, max_iterations=5, validation=pictures(40), output_network="best-validation")
    options = {"validation": pictures(40), "output_network": "best-validation", "epochs": 5}
    options |= {"batchnorm_statistics": "moving", "certify_every": 3}
    _, document = train(world, out, resume=str(out), **options)
    starts = document.of_kind("start")
    assert [start["iteration"] for start in starts] == [0, 5]
    assert len(replay.parts_of(document, 0, 15)) == 2
    assert_equal(audit(world, out, options=options_of(**options)), 15)


class Momentum:
    """A custom optimizer: momentum without options."""

    def __init__(self, learning_rate):
        self.learning_rate, self.velocity = learning_rate, {}

    def __call__(self, parameters, gradients):
        stepped = {}
        for name, value in parameters.items():
            old = self.velocity.get(name, np.zeros_like(value))
            step = np.float32(self.learning_rate) * gradients[name]
            self.velocity[name] = np.float32(0.8) * old - step
            stepped[name] = value + self.velocity[name]
        return stepped

    def state(self):
        return self.velocity

    def load_state(self, state):
        self.velocity = dict(state)


@SLOW_ON_RANKS
@pytest.mark.parametrize("make", [lambda: dl.SGDM(0.05, momentum=0.7), lambda: Momentum(0.05)])
def test_an_optimizer_of_a_program(world, out, make):
    train(world, out, optimizer=make(), learning_rate=0.05)
    assert_equal(audit(world, out, optimizer=make()), 12)
    with pytest.raises(UserError, match="optimizer: expected .*, found none"):
        audit(world, out)


def squared_loss(net, images, targets):
    return dl.softmax_cross_entropy(net(images), targets)


@SLOW_ON_RANKS
def test_a_loss_of_a_program(world, out):
    train(world, out, loss=squared_loss)
    with pytest.raises(UserError, match="--loss: expected the function squared_loss"):
        audit(world, out)
    assert_equal(audit(world, out, options=options_of(loss=squared_loss)), 12)


class Double(dl.Layer):
    """A custom layer."""

    layer_class = "Double"

    def build(self, shape):
        return dl.Built(shape)

    def forward(self, x, context):
        return dl.add(x, x)


@SLOW_ON_RANKS
def test_a_custom_layer(world, out):
    train(world, out, net=dl.Network([Double(), dl.Dense(3)], (1, 6, 6), seed=0))
    with pytest.raises(UserError, match="its network cannot be built: unknown layer type 'Double'"):
        audit(world, out, net=None)
    assert_equal(audit(world, out, net=None, layers=[Double]), 12)


def test_effective_options_are_all_but_those_that_change_no_weights():
    """An option that a resumed run may change is neutral, or it changes the network."""
    free = {name for name, option in OPTIONS.items() if option.metadata["resume"] == "free"}
    effective = {"batch_per_rank", "batchnorm_statistics", "certify_every", "checkpoint_every"}
    effective |= {"max_iterations", "metrics", "on_bad_image", "on_nan", "test_flips"}
    assert free - set(replay.NEUTRAL) == effective
    assert set(replay.NEUTRAL) - free == {"certify"}


@SLOW_ON_RANKS
def test_the_options_of_a_replay_are_those_of_the_run(world, out):
    train(world, out, l2=0.01, flip="x", learn_rate_schedule="cosine", average="swa")
    document = certificate.read(out)
    (start,) = document.of_kind("start")
    options = replay.options_of(document, start, {})
    texts = settings.options_of(options)
    changed = {name for name in texts if texts[name] != start["options"][name]}
    assert changed <= set(replay.NEUTRAL)
    assert (options.l2, options.flip, options.certify) == (0.01, "x", "none")
