"""Test certificates of jobs: the same states on any number of ranks, killed, resumed, in sweeps."""

import hashlib
import os
import signal

import h5py
import jobs
import launcher
import networks
import pool
import pytest
import tomli_w
from launcher import finish
from limits import wait_until

import mpidl as dl
from mpidl.certificates import certificate, signing, states
from mpidl.training.files import checkpoint, model_file

SLOW = pytest.mark.slow("jobs")
INTERVAL = 3  # iterations between states, and between kept checkpoints
CERTIFY = ["--certify", "--certify-every", INTERVAL, "--checkpoint-keep", 2 * INTERVAL]
# Augmentation, mixing, an average of the weights, and the best network, all of which are stateful.
WORDS = [
    *("--flip", "x", "--translate", 1, "--mixup", 0.2, "--shuffle", "every-epoch"),
    *("--average", "ema", "--solver", "adam", "--validation-data", "test"),
    *("--validation-frequency", 5, "--output-network", "best-validation", "--threads", 1),
    *CERTIFY,
]


def validations_of(out):
    document = certificate.read(out)
    assert document.broken is None
    links = document.of_kind("validation")
    return {link["iteration"]: (link["loss"], link["accuracy"], link["best"]) for link in links}


def assert_kept(out):
    """Assert that the states of the certificate are those of the checkpoints that the run kept."""
    recorded, paths = jobs.states(out), checkpoint.kept_paths(out)
    assert list(paths) == [i for i in recorded if i % (2 * INTERVAL) == 0]
    for iteration, path in paths.items():
        tables, _ = model_file.read(path)
        assert states.table_digests(tables) == recorded[iteration]["tables"]


def start_again(ranks, out):
    """Resume a run, and return the job when it has trained for five iterations."""
    path, text = out / "metrics.jsonl", '"kind": "certificate_state"'
    count = path.read_text().count(text)
    words = jobs.command("train", "--resume", out, network=None)
    job = launcher.start(ranks, *words, env=jobs.without_plots())
    wait_until(lambda: path.read_text().count(text) > count + 1 or job.poll() is not None)
    return job


@pytest.mark.timeout(120)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=SLOW)])
def test_killed_twice_and_resumed_on_other_ranks(pictures, tmp_path, precision):
    """A run on 2 ranks, killed, on 3 ranks, stopped by a signal, and completed on 1 rank."""
    out, reference, other = (tmp_path / name for name in ("run", "reference", "other"))
    words = [*WORDS, "--precision", precision]
    with jobs.start(2, pictures, out, *words, *jobs.ENDLESS, "--checkpoint-every", 4) as job:
        os.kill(job.rank_pids()[0], signal.SIGKILL)
        assert finish(job).returncode not in (0, jobs.STOPPED)
    with start_again(3, out) as job:
        os.kill(job.rank_pids()[1], signal.SIGUSR1)
        assert finish(job).returncode == jobs.STOPPED
    assert not (out / "certificate.json").exists()
    last = jobs.iterations(out)[-1] + 5
    jobs.resume(1, out, "--max-iterations", last)
    jobs.train(3, pictures, reference, *words, *jobs.ENDLESS, "--max-iterations", last)
    assert jobs.states(out) == jobs.states(reference)
    assert list(jobs.states(out))[-1] == last
    assert validations_of(out) == validations_of(reference)
    assert_kept(out)
    assert_kept(reference)
    starts = certificate.read(out).of_kind("start")
    assert [start["ranks"] for start in starts] == [2, 3, 1]
    assert certificate.read(out).subjects == {
        "weights": jobs.rehash(reference / "model.h5"),
        "model.h5": hashlib.sha256((out / "model.h5").read_bytes()).hexdigest(),
    }
    # A negative control: another seed has other states.
    jobs.train(2, pictures, other, *words, "--seed", 1, "--max-iterations", INTERVAL)
    assert jobs.states(other)[0]["tables"] != jobs.states(out)[0]["tables"]
    assert jobs.states(other)[INTERVAL]["progress"] != jobs.states(out)[INTERVAL]["progress"]


def test_the_end_of_a_command(pictures, tmp_path):
    """The certificate of a command has the test, and the signature of an SSH key."""
    key, out = tmp_path / "key", tmp_path / "run"
    launcher.subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    words = ["--epochs", 1, "--certify", "public", "--certify-key", key]
    jobs.train(2, pictures, out, *words, "--validation-fraction", 0.2)
    document = certificate.read(out)
    summary, (first_start, *_) = jobs.summary(out), document.of_kind("start")
    test, data = document.end["test"], first_start["data"]
    assert (test["loss"], test["accuracy"]) == (summary["loss"], summary["accuracy"])
    sets = data["train"], data["validation"], test["data"]
    assert [images["images"] for images in sets] == [150, 39, 21]
    assert document.end["validation"]["loss"] == summary["validation_loss"]
    assert first_start["inputs"]["network"] == "networks.py:small"
    assert str(tmp_path) not in (out / "certificate.json").read_text()
    assert str(jobs.ROOT) not in (out / "certificate.json").read_text()
    manifest = (out / "certificate-images.txt").read_bytes()
    assert document.manifest == hashlib.sha256(manifest).hexdigest()
    lines = [line for line in manifest.decode().splitlines() if line.startswith("#")]
    assert lines == ["# train 150", "# validation 39", "# test 21"]
    signing.verify(out / "certificate.json", out / "certificate.json.sig")
    # Without the key, the next certificate has no signature.
    jobs.resume(1, out, "--epochs", 2, "--certify-key", "none")
    assert certificate.read(out).end["iteration"] == 2 * first_epoch_of(document)
    assert not (out / "certificate.json.sig").exists()


def first_epoch_of(document):
    return document.of_kind("state")[-1]["iteration"]


def test_a_program_has_the_chain_of_the_command(pictures, tmp_path):
    """dl.train records the images and the states of the command; its certificate has no test."""
    command, program = tmp_path / "command", tmp_path / "program"
    jobs.train(2, pictures, command, "--epochs", 1, "--certify", "public", "--certify-every", 3)
    images = dl.data.open_data(str(pictures))[0].split(0.9, seed=0)[0]
    net = dl.Network(networks.small(images.image_shape, 3), images.image_shape, seed=0)
    options = {"epochs": 1, "batch_size": 50, "certify": "public", "certify_every": 3}
    options |= {"plots": "none"}
    dl.train(net, images, dl.TrainingOptions(**options, verbose="off"), out=str(program))
    assert jobs.states(program) == jobs.states(command)
    first, second = (certificate.read(folder) for folder in (command, program))
    (first_start,), (second_start,) = (document.of_kind("start") for document in (first, second))
    for name in ("software", "arithmetic", "network", "optimizer", "data"):
        assert second_start[name] == first_start[name], name
    assert second.subjects == {"weights": jobs.weights_hash(command)}
    assert second.end["test"] is None and second_start["inputs"] == {}


def test_weights_of_a_certified_run(pictures, tmp_path):
    """A run that starts from a model points to the model's certificate, also if it is resumed."""
    first, second = tmp_path / "first", tmp_path / "second"
    jobs.train(1, pictures, first, "--certify", "--max-iterations", 1)
    words = ["--certify", "--weights", first / "model.h5", "--max-iterations"]
    jobs.train(2, pictures, second, *words, 2, network=None)
    expected = {
        name: hashlib.sha256((first / name).read_bytes()).hexdigest()
        for name in ("model.h5", "certificate.json")
    }
    (first / "certificate.json").unlink()
    jobs.resume(1, second, "--max-iterations", 3)
    starts = certificate.read(second).of_kind("start")
    assert len(starts) == 2
    for start in starts:
        weights = start["weights"]
        assert [weights["sha256"], weights["certificate"]] == list(expected.values())
    jobs.train(1, pictures, tmp_path / "third", *words, 1, network=None)
    (start,) = certificate.read(tmp_path / "third").of_kind("start")
    assert start["weights"] == {"sha256": expected["model.h5"], "certificate": None}


def test_trials_of_a_sweep_name_the_sweep(pictures, tmp_path):
    file, out = tmp_path / "rates.toml", tmp_path / "sweep"
    common = {"network": jobs.SMALL, "data": str(pictures), "threads": 1, "certify": True}
    common |= {"batch_size": 50, "max_iterations": 2}
    file.write_text(tomli_w.dumps({"train": common, "grid": {"seed": [0, 1, 2]}}))
    pool.run(2, "-m", "mpidl.sweep", file, "--out", out, check=0)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for trial, folder in enumerate(sorted(out.glob("trial-*")), 1):
        (start,) = certificate.read(folder).of_kind("start")
        assert start["sweep"] == {"file": digest, "trial": trial, "trials": 3}
        assert start["options"]["seed"] == str(trial - 1)


@SLOW
def test_skipped_images(pictures, tmp_path):
    """Images that cannot be read have digests of zeros, and the weights are those without them."""
    data = tmp_path / "images"
    launcher.shutil.copytree(pictures, data)
    (data / "box" / "03.png").write_bytes(b"no image")
    words = ["--epochs", 1, "--on-bad-image", "skip", "--threads", 1]
    expected = jobs.trained_hash(1, data, tmp_path / "plain", *words)
    assert jobs.trained_hash(3, data, tmp_path / "run", *words, "--certify") == expected
    lines = (tmp_path / "run" / "certificate-images.txt").read_text().splitlines()
    assert lines.count("0" * 64) == 1


@pytest.mark.slow("restarts")
def test_a_restarted_job(pictures, tmp_path):
    """A job that dies and is started again by mpidl launch has the states of a whole run."""
    out, reference = tmp_path / "run", tmp_path / "reference"
    options = ["--batch-size", 50, "--epochs", 15, "--checkpoint-every", 2, *CERTIFY]
    words = jobs.command("train", *options, network=jobs.SMALL, data=pictures, out=out)
    words = ["-m", "mpidl.launch", "--restarts", 2, "--", *launcher.command(2, *words)]
    path, text = out / "metrics.jsonl", '"kind": "iteration"'
    with launcher.start(None, *words, env=jobs.without_plots()) as job:
        wait_until(lambda: path.exists() and path.read_text().count(text) >= 10)
        os.kill(job.rank_pids()[1], signal.SIGKILL)
        assert finish(job).returncode == 0
    jobs.train(1, pictures, reference, *options[2:])
    assert jobs.states(out) == jobs.states(reference)
    assert len(certificate.read(out).of_kind("start")) == 2


def test_a_kept_checkpoint_has_one_file_with_the_current_one(pictures, tmp_path):
    """A kept checkpoint is a link, so it costs no second write; a copy is the same if need be."""
    out = tmp_path / "run"
    jobs.train(1, pictures, out, "--epochs", 1, "--checkpoint-keep", jobs.ITERATIONS)
    path = out / "checkpoints" / f"{jobs.ITERATIONS:08}.h5"
    assert os.path.samefile(path, out / "checkpoint.h5")
    with h5py.File(path) as file:
        assert file.attrs["format"] == "mpidl"
