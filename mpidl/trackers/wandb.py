"""Record a run for Weights & Biases offline, in a folder that `wandb sync` uploads."""

from __future__ import annotations

import glob
import io
import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpidl.errors import UserError
from mpidl.report.status import FINISHED
from mpidl.trackers.base import Tracker, folder_of_run, name_of_run
from mpidl.trackers.records import IDENTITIES, Histogram, identity, need, remember, writing

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer

SETTINGS = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}


class WandbHook(Tracker):
    """Records a run for Weights & Biases offline; ``wandb sync`` can upload the record later.

    Parameters
    ----------
    project : str
        Name of the project.
    name : str, optional
        Name of the run. The default is the name of the run's folder.
    folder : path, optional
        Folder in which the subfolder "wandb" is created. The default is the folder of the run.

    Raises
    ------
    UserError
        If wandb is not installed.
    """

    def __init__(
        self,
        project: str = "mpidl",
        name: str | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if not project:
            raise UserError("--wandb: expected the name of a project, found an empty name")
        need("wandb", "wandb")
        self.project, self.name, self.folder = project, name, folder

    @classmethod
    def written(cls, folder: str) -> list[str]:
        """Return the folders that a run has written, and the file that identifies them."""
        run_id = str(identity(folder, "wandb").get("run_id", ""))
        pattern = os.path.join(glob.escape(folder), "wandb", f"offline-run-*-{run_id}")
        parts = glob.glob(pattern) if run_id.isalnum() else []
        return [*parts, os.path.join(folder, IDENTITIES)]

    def open(self, trainer: Trainer) -> None:
        """Create an offline run, or continue the stored run if the training is resumed.

        The results folder of the run identifies the record that a resumed run continues.
        """
        os.environ.update({key: os.environ.get(key, text) for key, text in SETTINGS.items()})
        import wandb

        self._wandb, self._run_folder = wandb, trainer.writer.out
        folder = folder_of_run(trainer, "--wandb") if self.folder is None else self.folder
        self._parts = os.path.join(os.path.abspath(folder), "wandb")
        facts = identity(self._run_folder, "wandb") if trainer.position.iteration else {}
        self.run_id: str = facts.get("run_id") or uuid.uuid4().hex[:8]
        # The last recorded iteration of each name. A resumed run does not record iterations again.
        self._steps: dict[str, int] = dict(facts.get("steps", {}))
        with self._writing():
            os.makedirs(self._parts, exist_ok=True)
            self._run = wandb.init(
                project=self.project,
                name=self.name or name_of_run(self._run_folder),
                id=self.run_id,
                resume="allow",
                dir=os.path.dirname(self._parts),
                mode="offline",
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_code=True,
                    disable_git=True,
                    x_disable_stats=True,
                    x_disable_machine_info=True,
                ),
            )
        self.flush()

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Record the options."""
        with self._writing():
            self._run.config.update(dict(values), allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of an iteration, except those that were recorded before a resume."""
        self._log(step, dict(values))

    def picture(self, name: str, step: int, png: bytes) -> None:
        """Record a picture."""
        from PIL import Image

        with Image.open(io.BytesIO(png)) as image:
            self._log(step, {name: self._wandb.Image(image)})

    def histogram(self, name: str, step: int, values: Histogram) -> None:
        """Record a histogram."""
        counts, edges = values.counts.tolist(), values.edges.tolist()
        self._log(step, {name: self._wandb.Histogram(np_histogram=(counts, edges))})

    def file(self, path: str) -> None:
        """Record a copy of a file."""
        with self._writing():
            self._run.save(path, base_path=os.path.dirname(path), policy="now")

    def flush(self) -> None:
        """Store the last iterations, from which a resumed run continues."""
        remember(self._run_folder, "wandb", {"run_id": self.run_id, "steps": self._steps})

    def close(self, state: str = FINISHED) -> None:
        """End the record. Its exit code is 0 if the run has finished."""
        self.flush()
        with self._writing():
            self._run.finish(exit_code=int(state != FINISHED))

    def _log(self, step, values):
        values = {name: v for name, v in values.items() if step > self._steps.get(name, -1)}
        if values:
            with self._writing():
                self._run.log(values, step=step)
            self._steps |= dict.fromkeys(values, step)

    def _writing(self):
        # Weights & Biases raises its own errors, and errors of the sockets that connect to its
        # process.
        return writing(self._parts, self._wandb.Error, RuntimeError)
