"""Record a run in an MLflow file store: parameters, metrics, pictures and files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpidl.errors import UserError
from mpidl.report.status import FAILED, FINISHED, STOPPED
from mpidl.text import printable
from mpidl.trackers.base import Tracker, name_of_run
from mpidl.trackers.records import IDENTITIES, identity, need, remember, writing

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer

STATES = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
FLUSH_SECONDS = 10.0  # shortest time between two writes during an epoch
METRICS, PARAMETERS = 1000, 100  # largest numbers that MLflow accepts per request
MAX_TEXT = 500  # longest value of a parameter, in characters
LOCK = ".mpidl-lock"  # file in the store
SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow 3 otherwise refuses folders
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",  # no warning on nodes without git
}


class MLflowHook(Tracker):
    """Records a run in a file store that MLflow's user interface reads.

    Parameters
    ----------
    store : path
        Folder of the store.
    experiment : str
        Name of the experiment. A missing experiment is created.
    name : str, optional
        Name of the run. The default is the name of the run's folder.

    Raises
    ------
    UserError
        If MLflow is not installed, or if the store is a URL or an empty name.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] = "mlruns",
        experiment: str = "mpidl",
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.store, self.experiment, self.name = os.fspath(store), experiment, name
        if "://" in self.store or not self.store:
            kind = "a URL" if self.store else "an empty name"
            raise UserError(f"--mlflow {self.store}: expected a folder, found {kind}")
        need("mlflow", "mlflow")

    @classmethod
    def written(cls, folder: str) -> list[str]:
        """Return the path of the file that identifies the record of a run."""
        return [os.path.join(folder, IDENTITIES)]

    def open(self, trainer: Trainer) -> None:
        """Create a run in the store, or continue the stored run if the training is resumed."""
        os.environ.update({key: os.environ.get(key, text) for key, text in SETTINGS.items()})
        from mlflow import entities
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        folder, self.store = trainer.writer.out, os.path.abspath(self.store)
        self._library_error, self._entities = MlflowException, entities
        self._metrics: list[Any] = []
        self._steps: dict[str, int] = {}  # the last recorded iteration of each metric
        self._flush_time = time.monotonic()
        with self._writing():
            os.makedirs(self.store, exist_ok=True)
            self._client = MlflowClient(tracking_uri=Path(self.store).as_uri())
            run = self._resumed(folder) if trainer.position.iteration else None
            self.is_new = run is None
            if run is None:
                name = self.name or name_of_run(folder)
                run = self._client.create_run(self._experiment_id(), run_name=name)
        self.run_id: str = run.info.run_id
        remember(folder, "mlflow", {"store": self.store, "run_id": self.run_id})

    def _experiment_id(self):
        """Return the ID of the experiment. Create the experiment if it does not exist."""
        name = self.experiment
        with _locked(self.store):  # without a lock, two runs could create the experiment twice
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                try:
                    return self._client.create_experiment(name)
                except self._library_error:  # another host made it, and the locks do not work
                    experiment = self._client.get_experiment_by_name(name)
                    if experiment is None:
                        raise
        if experiment.lifecycle_stage != "active":
            raise UserError(f"{self.store}: the experiment {name} is deleted: choose another name")
        return experiment.experiment_id

    def _resumed(self, folder):
        """Return the MLflow run to continue, with its status set to running, or None."""
        facts = identity(folder, "mlflow")
        if facts.get("store") != self.store:
            return None
        try:
            run = self._client.get_run(facts["run_id"])
        except (self._library_error, KeyError):
            return None
        if run.info.lifecycle_stage != "active":  # deleted in the user interface
            return None
        self._client.update_run(run.info.run_id, status="RUNNING")
        for name in run.data.metrics:
            points = self._client.get_metric_history(run.info.run_id, name)
            self._steps[name] = max(point.step for point in points)
        return run

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Record the options. MLflow allows no changes, so a resumed run keeps the first values."""
        if not self.is_new:
            return
        parameters = [
            self._entities.Param(name, printable(str(value))[:MAX_TEXT])
            for name, value in values.items()
        ]
        with self._writing():
            for first in range(0, len(parameters), PARAMETERS):
                part = parameters[first : first + PARAMETERS]
                self._client.log_batch(self.run_id, params=part)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of an iteration, except those that were recorded before a resume."""
        milliseconds = int(time.time() * 1000)
        for name, value in values.items():
            if step > self._steps.get(name, -1):
                self._metrics.append(self._entities.Metric(name, value, milliseconds, step))
        if time.monotonic() - self._flush_time > FLUSH_SECONDS:
            self.flush()

    def picture(self, name: str, step: int, png: bytes) -> None:
        """Record a picture as the artifact pictures/NAME.png."""
        with self._writing(), tempfile.TemporaryDirectory(prefix="mpidl-") as folder:
            path = os.path.join(folder, f"{name.replace('/', '-')}.png")
            Path(path).write_bytes(png)
            self._client.log_artifact(self.run_id, path, "pictures")

    def file(self, path: str) -> None:
        """Record a copy of a file as an artifact."""
        with self._writing():
            self._client.log_artifact(self.run_id, path)

    def flush(self) -> None:
        """Write all metrics."""
        self._flush_time = time.monotonic()
        with self._writing():
            while self._metrics:
                self._client.log_batch(self.run_id, metrics=self._metrics[:METRICS])
                del self._metrics[:METRICS]

    def close(self, state: str = FINISHED) -> None:
        """Write all metrics, and end the run with MLflow's status."""
        self.flush()
        with self._writing():
            self._client.set_terminated(self.run_id, STATES[state])

    def _writing(self):
        return writing(self.store, self._library_error)


@contextlib.contextmanager
def _locked(folder):
    """Let only one process at a time run the block, if the file system supports locks."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
