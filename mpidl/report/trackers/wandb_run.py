"""Record a run for Weights & Biases offline, in a folder that `wandb sync` uploads."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from typing import Any

from mpidl.report.trackers.tracking import FINISHED, Histogram, Tracker, identity, remember, writing

SETTINGS = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}


class WandbRun(Tracker):
    """An offline run of Weights & Biases, in the subfolder wandb of `folder`.

    The results folder of the run identifies the record that a resumed run continues. Raises
    UserError if the folder cannot be written.
    """

    def __init__(
        self, folder: str, project: str, name: str, run_folder: str | None, is_resumed: bool
    ):
        os.environ.update({key: os.environ.get(key, text) for key, text in SETTINGS.items()})
        import wandb

        self.folder, self.run_folder, self._wandb = folder, run_folder, wandb
        facts = identity(run_folder, "wandb") if is_resumed else {}
        self.run_id: str = facts.get("run_id") or uuid.uuid4().hex[:8]
        # The last recorded iteration of each name. A resumed run does not record iterations again.
        self._steps: dict[str, int] = dict(facts.get("steps", {}))
        with self._writing():
            os.makedirs(os.path.join(folder, "wandb"), exist_ok=True)
            self._run = wandb.init(
                project=project,
                name=name,
                id=self.run_id,
                resume="allow",
                dir=folder,
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
        self._remember()

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
        self._remember()

    def close(self, state: str = FINISHED) -> None:
        """End the record. Its exit code is 0 if the run has finished."""
        self._remember()
        with self._writing():
            self._run.finish(exit_code=int(state != FINISHED))

    def _log(self, step, values):
        values = {name: v for name, v in values.items() if step > self._steps.get(name, -1)}
        if values:
            with self._writing():
                self._run.log(values, step=step)
            self._steps |= dict.fromkeys(values, step)

    def _remember(self):
        facts = {"run_id": self.run_id, "steps": self._steps}
        remember(self.run_folder, "wandb", facts)

    def _writing(self):
        # Weights & Biases raises its own errors, and errors of the sockets that connect to its
        # process.
        return writing(os.path.join(self.folder, "wandb"), self._wandb.Error, RuntimeError)
