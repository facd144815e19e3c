"""Define the hook that records a run in an MLflow file store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpidl.errors import UserError
from mpidl.report.trackers import tracking
from mpidl.report.trackers.tracking import Tracker
from mpidl.training.tracking_hooks.base import TrackingHook, name_of_run

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer


class MLflowHook(TrackingHook):
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
        tracking.need("mlflow", "--mlflow", "mlflow")

    def open(self, trainer: Trainer) -> Tracker:
        """Create a run in the store, or continue the stored run if the training is resumed."""
        from mpidl.report.trackers.mlflow_store import MLflowRun

        out, is_resumed = trainer.writer.out, trainer.position.iteration > 0
        return MLflowRun(
            self.store, self.experiment, self.name or name_of_run(out), out, is_resumed
        )
