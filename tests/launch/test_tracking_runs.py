"""Test that `train` records runs for MLflow and Weights & Biases without network access."""

import collections
import importlib.util
import json
import os
import re
import shutil
import signal
import struct
import sys
import types

import jobs
import launcher
import pytest

import mpidl as dl

pytestmark = [pytest.mark.slow("files"), pytest.mark.timeout(180)]
EXTRAS = {"mlflow": "mlflow", "wandb": "wandb"}  # {package: extra}


def needs(package):
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} is not installed (pip install 'mpidl[{EXTRAS[package]}]')",
    )


def train(ranks, data, out, *words, check=0):
    """Train in a separate job, because the process of Weights & Biases ends only with the job."""
    words = jobs.command("train", "--batch-size", 50, *words, data=data, out=out)
    return launcher.mpirun(ranks, *words, env=jobs.without_plots(), check=check)


def resume(ranks, out, *words):
    words = ["-m", "mpidl.train", "--resume", out, *words]
    return launcher.mpirun(ranks, *words, env=jobs.without_plots(), check=0)


@needs("mlflow")
def test_mlflow_reads_a_resumed_run(pictures, tmp_path, monkeypatch):
    """After a resume, the store has each iteration once, the options, the results and the files."""
    out, store = tmp_path / "run", tmp_path / "mlruns"
    words = ["--mlflow", store, "--max-iterations"]
    train(2, pictures, out, *words, 3)
    resume(3, out, "--max-iterations", 6)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=store.as_uri())
    experiment = client.get_experiment_by_name("mpidl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["batch_size"] == "50" and run.data.params["ranks"] == "2"
    summary, metrics = jobs.summary(out), jobs.metrics(out)
    assert run.data.metrics["test/accuracy"] == summary["accuracy"]
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    expected = [(r["iteration"], r["loss"]) for r in metrics if r["kind"] == "iteration"]
    assert sorted((point.step, point.value) for point in losses) == expected
    assert len(expected) == 6
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"model.h5", "summary.json", "options.toml", "confusion.csv", "pictures"} <= files


def records_of(path):
    """Yield the records of a .wandb file, which is a log of 32 KiB blocks of framed messages."""
    from wandb.proto import wandb_internal_pb2

    content, position, message = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # skip the padding at the end of a block
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        message += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a complete message, or the last part of a message
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record


@needs("wandb")
def test_weights_and_biases_reads_a_resumed_run(pictures, tmp_path):
    out = tmp_path / "run"
    train(2, pictures, out, "--wandb", "shapes", "--max-iterations", 5)
    resume(1, out, "--max-iterations", 7)
    files = sorted((out / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and files[0].name == files[1].name  # two parts of one run
    run_id = json.loads((out / "tracking.json").read_text())["wandb"]["run_id"]
    assert all(file.parent.name.endswith(f"-{run_id}") for file in files)  # for --overwrite
    steps, losses = collections.Counter(), {}
    for file in files:
        for record in records_of(file):
            if record.HasField("run"):
                assert record.run.project == "shapes"
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if "train/loss" in items:
                steps[items["_step"]] += 1
                losses[items["_step"]] = items["train/loss"]
    assert steps == dict.fromkeys(range(1, 8), 1)
    expected = {r["iteration"]: r["loss"] for r in jobs.metrics(out) if r["kind"] == "iteration"}
    assert losses == expected
    copies = {path.name for path in (out / "wandb").glob("offline-run-*/files/*")}
    assert {"summary.json", "model.h5", "confusion.csv"} <= copies


CONNECTIONS = (
    "import socket; s = socket.socket(); s.settimeout(0.1); s.connect_ex(('192.0.2.1', 9))"
)


def addresses(folder, *words):
    """Return the network addresses to which a command and its children connect or send."""
    log = folder / "strace.log"
    command = ["strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmsg", "-o", str(log)]
    command += [sys.executable, *map(str, words)]
    environment = launcher.environment(jobs.without_plots())
    launcher.finish(
        launcher.Job(
            command,
            stdin=launcher.subprocess.DEVNULL,
            stdout=launcher.subprocess.PIPE,
            stderr=launcher.subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
    )
    text = log.read_text(errors="replace")
    return set(re.findall(r'(?:inet_addr\(|inet_pton\(AF_INET6, )"([^"]+)"', text))


@needs("wandb")
@needs("mlflow")
@pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed (apt-get install strace)"
)
def test_no_socket_leaves_loopback(pictures, tmp_path):
    assert addresses(tmp_path, "-c", CONNECTIONS) == {"192.0.2.1"}  # negative control
    words = jobs.command("train", "--max-iterations", 2, data=pictures, out=tmp_path / "run")
    words += ["--tensorboard", "--mlflow", tmp_path / "mlruns", "--wandb", "shapes"]
    remote = {a for a in addresses(tmp_path, *words) if not a.startswith("127.") and a != "::1"}
    assert remote == set()
    assert (tmp_path / "run" / "model.h5").exists() and os.listdir(tmp_path / "mlruns")


RACE = """
import sys
import time
import types

from mlflow.tracking import MlflowClient
from mpidl.ranks.world import World
import mpidl as dl

create, world = MlflowClient.create_experiment, World()

def create_slowly(*arguments):
    time.sleep(0.5)
    return create(*arguments)

MlflowClient.create_experiment = create_slowly
world.barrier()
position, writer = types.SimpleNamespace(iteration=0), types.SimpleNamespace(out=None)
tracker = dl.MLflowHook(sys.argv[1], name=f"trial {world.rank}")
tracker.open(types.SimpleNamespace(writer=writer, position=position))
tracker.close()
"""


@needs("mlflow")
def test_runs_that_start_together_share_an_experiment(tmp_path, monkeypatch):
    from mpidl.trackers import mlflow as mlflow_store

    environment = jobs.without_plots() | mlflow_store.SETTINGS
    launcher.mpirun(3, "-c", RACE, tmp_path / "mlruns", env=environment, check=0)
    for name, value in mlflow_store.SETTINGS.items():
        monkeypatch.setenv(name, value)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (experiment,) = client.search_experiments()
    assert len(client.search_runs([experiment.experiment_id])) == 3


@needs("mlflow")
def test_a_deleted_record_is_replaced(tmp_path, monkeypatch):
    from mpidl.trackers import mlflow as mlflow_store

    for name, value in mlflow_store.SETTINGS.items():
        monkeypatch.setenv(name, value)

    def opened(iteration):
        tracker = dl.MLflowHook(tmp_path / "mlruns")
        position = types.SimpleNamespace(iteration=iteration)
        writer = types.SimpleNamespace(out=tmp_path)
        tracker.open(types.SimpleNamespace(writer=writer, position=position))
        return tracker

    first = opened(0)
    first.close()
    resumed = opened(1)
    assert not resumed.is_new and resumed.run_id == first.run_id
    resumed._client.delete_run(first.run_id)
    replaced = opened(1)
    assert replaced.is_new and replaced.run_id != first.run_id


# `python -m mpidl.train` with a tracker whose disk is full at the end.
FULL = """
import sys

from mpidl.cli.train import main
from mpidl.ranks import failure
from mpidl.errors import UserError
from mpidl.trackers.base import Tracker
from mpidl.training import tracking

class FullDisk(Tracker):
    def open(self, trainer):
        pass

    def close(self, state="finished"):
        raise UserError("store: cannot be written: No space left on device")

tracking.requested = lambda options, run=None, present=(): [] if run is None else [FullDisk()]
failure.run(lambda: main(sys.argv[1:]))
"""


def test_a_tracker_that_fails_at_the_end_costs_no_result(pictures, tmp_path):
    words = jobs.command("train", "--max-iterations", 2, data=pictures, out=tmp_path / "run")[2:]
    result = launcher.mpirun(2, "-c", FULL, *words, env=jobs.without_plots(), check=2)
    assert jobs.refusal(result) == "store: cannot be written: No space left on device"
    assert (tmp_path / "run" / "model.h5").exists()
    assert result.stdout.splitlines()[-1].startswith("weights_sha256: ")


def test_a_tracker_that_fails_after_a_signal_keeps_the_exit_code(pictures, tmp_path):
    words = jobs.command("train", *jobs.ENDLESS, data=pictures, out=tmp_path / "run")[2:]
    with launcher.start(2, "-c", FULL, *words, env=jobs.without_plots()) as job:
        next(line for line in job.stdout if line.startswith("Epoch: 2,"))
        os.kill(job.rank_pids()[1], signal.SIGUSR1)
        result = launcher.finish(job)
    assert result.returncode == jobs.STOPPED, result.stderr
    *_, warning, last = result.stdout.splitlines()
    assert warning == "warning: store: cannot be written: No space left on device"
    assert last.startswith("SIGUSR1: stopped at iteration ")
