"""Test what a certified run records, and the certificate that it writes."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from google.protobuf import json_format
from in_toto_attestation.v1 import statement, statement_pb2
from short_training import pictures, small, trained

import mpidl as dl
from mpidl.certificates import certificate, settings, sources, states
from mpidl.errors import UserError
from mpidl.training.files import checkpoint, model_file, run_folder

pytestmark = pytest.mark.usefixtures("without_plots")
OPTIONS = {"epochs": 2, "batch_size": 40, "verbose": "off", "certify": True, "certify_every": 2}
PER_EPOCH = 3  # iterations
POSITION = (
    *("epoch", "batch", "iteration", "loss", "correct", "images", "all_images", "epoch_loss"),
    *("rollbacks", "statistics_updates"),
)


def folder_of(world, tmp_path, name="run"):
    return world.broadcast(str(tmp_path / name))


def train(world, out, store=None, net=None, hooks=(), resume=None, optimizer=None, **options):
    net = small() if net is None else net
    options = dl.TrainingOptions(**OPTIONS | options)
    keywords = {"world": world, "out": out, "hooks": hooks, "resume": resume}
    store = pictures(100) if store is None else store
    result = dl.train(net, store, options, optimizer=optimizer, **keywords)
    world.barrier()  # all files are written
    return net, result


def states_of(out):
    """Return {iteration: (rollbacks, tables, progress)} of the states in a certificate."""
    document = certificate.read(out)
    assert document.broken is None
    return {
        state["iteration"]: (state["rollbacks"], state["tables"], state["progress"])
        for state in document.of_kind("state")
    }


def digests_of_file(path):
    """Return the digests of a checkpoint's tables and of its position, by h5py and hashlib."""

    def arrays(group, prefix=""):
        for name, item in group.items():
            if isinstance(item, h5py.Group):
                yield from arrays(item, f"{prefix}{name}.")
            else:
                yield prefix + name, item[()]

    digests = {}
    with h5py.File(path) as file:
        for table, group in file.items():
            if table.endswith(("best_learnables", "best_state")):
                continue
            total = hashlib.sha256()
            for name, array in sorted(arrays(group)):
                array = np.asarray(array)
                total.update(json.dumps([table, name, array.dtype.str, array.shape]).encode())
                total.update(array.tobytes())
            digests[table] = total.hexdigest()
        position = json.loads(file.attrs["facts"])["position"]
    text = json.dumps({n: position[n] for n in POSITION}, sort_keys=True, separators=(",", ":"))
    return digests, hashlib.sha256(text.encode()).hexdigest()


def test_states_are_those_of_the_checkpoints(world, tmp_path):
    """Digests by h5py and hashlib are those of the states. Another seed has other digests."""
    out = folder_of(world, tmp_path)
    options = {"checkpoint_keep": 2, "solver": "adam", "average": "ema", "validation": pictures(20)}
    options |= {"output_network": "best-validation", "validation_frequency": 2}
    options |= {"normalization": "zerocenter"}
    net, result = train(world, out, **options)
    other = folder_of(world, tmp_path, "other")
    train(world, other, **options, seed=5, net=dl.Network(small().layers, (1, 6, 6), seed=5))
    recorded = states_of(out)
    assert list(recorded) == [0, 2, 3, 4, 6]
    paths = checkpoint.kept_paths(out)
    assert list(paths) == [0, 2, 4, 6]
    for iteration, path in paths.items():
        rollbacks, tables, progress = recorded[iteration]
        assert (tables, progress) == digests_of_file(path) and rollbacks == 0
        assert states.table_digests(model_file.read(path)[0]) == tables
        assert {"learnables", "state", "optimizer", "normalization", "initial_state"} == set(tables)
        assert tables["learnables"] != states_of(other)[iteration][1]["learnables"]
    # The end has the weights that the run returns, and each state its losses.
    document = certificate.read(out)
    assert document.end["weights"] == dl.weights_sha256(net) == document.subjects["weights"]
    assert document.end["returned_iteration"] == result.best_iteration
    losses = [loss for state in document.of_kind("state") for loss in state["losses"]]
    assert losses == list(result.history.iteration.loss)
    validations = document.of_kind("validation")
    assert [v["loss"] for v in validations] == list(result.history.validation.loss)
    arrays, _ = checkpoint.load(out)
    best = {n: states.table_digest(n, arrays[n]) for n in ("best_learnables", "best_state")}
    assert validations[-1]["best"] == best
    world.barrier()


def test_certify_does_not_change_the_weights(world, tmp_path):
    out = folder_of(world, tmp_path)
    net, _ = train(world, out, certify="public", checkpoint_keep=4)
    assert dl.weights_sha256(net) == dl.weights_sha256(trained(world)[0])
    document = certificate.read(out)
    assert document.salt is None and not Path(out, "certificate-salt.txt").exists()
    (start,) = document.of_kind("start")
    assert start["options"]["batch_size"] == "40" and start["inputs"] == {}
    assert start["network"]["layers"] == json.loads(json.dumps(net.spec()))
    assert start["ranks"] == world.size and start["hooks"] == [] and start["sweep"] is None
    assert start["data"]["validation"] is None and start["data"]["train"]["images"] == 100
    world.barrier()


def test_a_checker_of_in_toto_accepts_the_statement(world, tmp_path):
    """The in-toto project's own library parses the statement, and finds it valid."""
    out = folder_of(world, tmp_path)
    train(world, out, epochs=1)
    text = Path(out, "certificate.json").read_text()

    def check(content):
        parsed = json_format.Parse(content, statement_pb2.Statement())
        statement.Statement.copy_from_pb(parsed).validate()
        return parsed

    parsed = check(text)
    assert parsed.predicate_type == "urn:mpidl:training:1"
    weights = certificate.read(out).end["weights"]
    assert [dict(subject.digest) for subject in parsed.subject] == [{"sha256": weights}]
    with pytest.raises(ValueError, match="At least one digest required"):  # a negative control
        check(json.dumps(json.loads(text) | {"subject": [{"name": "weights"}]}))
    world.barrier()


def test_a_resumed_run_has_the_states_of_an_uninterrupted_one(world, tmp_path):
    """Interrupted in the middle of an epoch and at a validation, and resumed in another folder."""
    expected, part, moved = (folder_of(world, tmp_path, name) for name in "abc")
    options = {"validation": pictures(20), "validation_frequency": 2, "checkpoint_keep": 2}
    options |= {"output_network": "best-validation"}
    train(world, expected, **options)

    class Stop:
        def step(self, trainer):
            if trainer.position.iteration == 5:
                trainer.signals.name = "SIGUSR1"

    _, result = train(world, part, hooks=[Stop()], **options)
    assert result.stopped == "SIGUSR1"
    assert not Path(part, "certificate.json").exists()
    train(world, moved, resume=part, **options)
    assert states_of(moved) == states_of(expected)
    assert list(checkpoint.kept_paths(moved)) == [0, 2, 4, 6]
    starts = certificate.read(moved).of_kind("start")
    assert [start["iteration"] for start in starts] == [0, 5]
    assert starts[0]["hooks"][0].endswith("Stop") and starts[1]["hooks"] == []
    world.barrier()


class Spoil:
    """A hook that makes a weight NaN after an iteration, once."""

    def __init__(self, iteration):
        self.iteration_left = iteration

    def step(self, trainer):
        if trainer.position.iteration == self.iteration_left:
            self.iteration_left = None
            weight = np.array(trainer.net.parameters["dense1.weight"])
            weight.flat[0] = np.nan
            trainer.net.parameters["dense1.weight"] = weight


def test_a_rollback_rewinds_the_chain_and_the_kept_checkpoints(world, tmp_path):
    out = folder_of(world, tmp_path)
    options = {"on_nan": "rollback", "epochs": 3, "checkpoint_keep": 2, "certify_every": 1}
    _, result = train(world, out, hooks=[Spoil(5)], **options)
    assert result.rollbacks == 1  # to iteration 3, the end of an epoch
    recorded = states_of(out)
    assert list(recorded) == list(range(10))
    assert [rollbacks for rollbacks, *_ in recorded.values()] == [0] * 4 + [1] * 6
    for iteration, path in checkpoint.kept_paths(out).items():
        assert recorded[iteration][1:] == digests_of_file(path)
        with_rollback = {"rollback_learnables", "rollback_state"} <= set(recorded[iteration][1])
        assert with_rollback == (iteration % PER_EPOCH != 0)
    assert len(certificate.read(out).of_kind("start")) == 1
    world.barrier()


def test_a_start_after_a_rollback_is_recorded_again(world, tmp_path):
    """A run that resumes at iteration 5, and returns to iteration 3, keeps its start."""
    out = folder_of(world, tmp_path)
    options = {"on_nan": "rollback", "epochs": 3, "max_iterations": 5}
    train(world, out, **options)
    train(world, out, resume=out, hooks=[Spoil(6)], **options | {"max_iterations": None})
    starts = certificate.read(out).of_kind("start")
    assert [start["iteration"] for start in starts] == [0, 3]
    assert starts[1]["hooks"] == [f"{__name__}.Spoil"]
    world.barrier()


class Stored(dl.data.Datastore):
    """Images whose fingerprint does not cover their pixels, like those in files."""

    def __init__(self, store, change=0):
        self.image_shape, self.labels, self.classes = store.image_shape, store.labels, store.classes
        self.pixels = np.array(store.read(range(len(store))))
        self.pixels[17, 0, 3, 3] += change

    def read(self, indices):
        return self.pixels[indices]


def test_a_resumed_run_refuses_other_images(world, tmp_path):
    """The fingerprint of a set does not cover its pixels, but the certificate does."""
    out = folder_of(world, tmp_path)
    train(world, out, store=Stored(pictures(100)), max_iterations=4)
    other = Stored(pictures(100), change=1)
    with pytest.raises(UserError, match=r"^--resume: --data: the images, or certificate-salt.txt"):
        train(world, out, store=other, resume=out)
    train(world, out, store=Stored(pictures(100)), resume=out)
    world.barrier()
    if world.rank == 0:
        Path(out, "certificate-salt.txt").unlink()
    world.barrier()
    with pytest.raises(UserError, match="certificate-salt.txt: expected the salt"):
        train(world, out, store=Stored(pictures(100)), resume=out, epochs=3)


def test_a_resumed_run_needs_its_records(world, tmp_path):
    out, other = folder_of(world, tmp_path), folder_of(world, tmp_path, "other")
    train(world, out, max_iterations=4)
    saved = checkpoint.load(out)
    world.barrier()
    with pytest.raises(UserError, match="expected the certificate's records of the run so far"):
        train(world, other, resume=saved)
    with pytest.raises(UserError, match="--certify was private, is public"):
        train(world, out, resume=out, certify="public")


def test_runs_that_cannot_be_certified(world, tmp_path):
    with pytest.raises(UserError, match="--certify private: expected a folder for the run"):
        train(world, None)
    with pytest.raises(UserError, match="found World\\(plain=True\\)"):
        train(dl.World(plain=True), folder_of(world, tmp_path))
    with pytest.raises(UserError, match="--certify-key .*none: expected the file of an SSH key"):
        train(world, folder_of(world, tmp_path, "b"), certify_key="/none")
    for option, value in (("batchnorm", "local"), ("sampling", "partition"), ("batch_per_rank", 8)):
        flag = "--" + option.replace("_", "-")
        with pytest.raises(UserError, match=f"--certify public and {flag} {value}: the weights"):
            dl.TrainingOptions(certify="public", **{option: value})
    with pytest.raises(UserError, match="--certify-key k: expected --certify"):
        dl.TrainingOptions(certify_key="k")
    assert dl.TrainingOptions(certify=True).certify == "private"
    assert dl.TrainingOptions(certify=False).certify == "none"
    world.barrier()


def test_a_new_run_in_the_folder_removes_all_files(tmp_path):
    out = str(tmp_path / "run")
    world = dl.World()
    train(world, out, epochs=1, checkpoint_keep=1)
    (tmp_path / "run" / "checkpoints" / "notes.txt").write_text("mine")
    run_folder.make_folder(out)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoints"]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["notes.txt"]


CHANGED = {
    "defaults": {},
    "numbers": {"learning_rate": 1 / 3, "l2": 1e-05, "max_iterations": 7, "timeline": float("inf")},
    "lists": {"scale": (0.9, 1.1), "random_crop": "5x6", "class_weights": (1, 2.5)},
    "names": {"solver": "lars", "average": "swa", "fold": "1/5", "tensorboard": True},
    "nones": {"worker_load": None, "gradient_threshold": float("inf"), "threads": 3},
}


@pytest.mark.parametrize("name", CHANGED)
def test_options_from_texts(name):
    options = dl.TrainingOptions(**CHANGED[name], certify="public", certify_every=7)
    assert settings.options_from(settings.options_of(options)) == options


def test_texts_of_options_have_no_paths():
    options = dl.TrainingOptions(certify=True, certify_key="/x/k", track="mlflow=/x")
    texts = settings.options_of(options)
    assert not {"certify_key", "track"} & set(texts) and "/x" not in json.dumps(texts)
    inputs = {"network": "/x/net.py:small", "data": "/x/images", "validation_data": "test"}
    inputs |= {"weights": "/x/model.h5", "mlflow": "/x", "resize": "32x32", "test_data": None}
    expected = {"network": "net.py:small", "validation_data": "test", "resize": "32x32"}
    assert settings.inputs_of(inputs) == expected | {"test_data": "none"}


def test_the_augmenter_of_a_program():
    augmenter = dl.Augmenter(reflect_x=True, rotation=5, shear_x=(0, 3), crop=(5, 6), fill=(1, 2))
    texts = settings.options_of(dl.TrainingOptions(augmenter=augmenter))
    parsed = settings.options_from(json.loads(json.dumps(texts)))
    assert parsed.augmenter == augmenter
    with pytest.raises(UserError, match="augmenter: expected the parameters of an Augmenter"):
        settings.options_from({"augmenter": "[1]"})


def test_a_function_is_named_and_must_be_given():
    def rate(epoch, iteration):
        return 0.1

    texts = settings.options_of(dl.TrainingOptions(learn_rate_schedule=rate))
    assert texts["learn_rate_schedule"].endswith("rate")
    with pytest.raises(UserError, match="--learn-rate-schedule: expected the function .*rate"):
        settings.options_from(texts)
    options = settings.options_from(texts, learn_rate_schedule=rate)
    assert options.learn_rate_schedule is rate


def test_the_sources_are_those_of_an_installed_package(tmp_path):
    """The hash is that of the checkout, and changes with each source."""
    root = Path(sources.__file__).resolve().parents[2]
    package = tmp_path / "site" / "mpidl"
    ignored = shutil.ignore_patterns("__pycache__", "page.html")
    shutil.copytree(root / "mpidl", package, ignore=ignored)
    for name in ("formulas.h", "cpu/mpidl.h", "README.md", "build.py"):
        (package / "kernels" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "kernels" / name, package / "kernels" / name)
    shutil.copytree(root / "kernels" / "cuda", package / "kernels" / "cuda")

    def digest():
        program = "from mpidl.certificates import sources; print(sources.sources_sha256())"
        keywords = {"env": {"PYTHONPATH": str(tmp_path / "site")}, "cwd": tmp_path, "text": True}
        return subprocess.check_output([sys.executable, "-c", program], **keywords).strip()

    expected = sources.sources_sha256()
    assert digest() == expected
    kernel = next((package / "kernels" / "cuda").glob("*.cu"))
    kernel.write_text(kernel.read_text() + "\n")
    assert digest() != expected
