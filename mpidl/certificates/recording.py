"""Record a run for its certificate, and write the certificate at the end.

The records are lines of metrics.jsonl, so a run that is resumed or rolled back, or that has lost
ranks, removes those that it will repeat as it does with its other records.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.certificates import certificate, chain, images, settings, signing, sources, states
from mpidl.errors import UserError
from mpidl.files import json_object, on_rank_0, open_for_reading, sha256_of_file
from mpidl.ranks import failure
from mpidl.report import metrics
from mpidl.report.status import FINISHED
from mpidl.training.files import model_file
from mpidl.training.progress import OUTPUT_FUNCTION, PATIENCE, EpochSummary

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.data.loading.bad_images import BadImages
    from mpidl.evaluation.evaluate import Evaluation
    from mpidl.ranks.world import World
    from mpidl.training.run import Run
    from mpidl.training.trainer import Trainer

COMPLETE = (None, PATIENCE, OUTPUT_FUNCTION)  # reasons for the end of a run with its final network
SIGNATURE = certificate.FILE + signing.ENDING

Record = dict[str, Any]


class Recorder:
    """The hook that records a run, and writes certificate.json when the run is complete.

    It has the methods of a tracker. All ranks call them; rank 0 hashes and writes.

    Parameters
    ----------
    test_images : Datastore, optional
        The images of the test that `conclude` receives.

    Attributes
    ----------
    ends_with_training : bool
        Whether the certificate is written when the training ends. If false, the caller must call
        `conclude` after it has written model.h5.
    """

    copied = (images.SALT,)
    sees_state = True  # `hooks.of_run` places this hook just before the checkpoints

    def __init__(self, test_images: Datastore | None = None) -> None:
        self.test_images = test_images
        self.ends_with_training = True
        self.salt: bytes | None = None
        self.digests: dict[str, np.ndarray] = {}  # {name of a set: digests of its images}
        self.copies: dict[tuple, Record] = {}  # {place: record}, if the run may lose ranks
        self._trainer: Trainer
        self._start: Record = {}
        self._last: tuple[int, int] | None = None  # iteration and rollbacks of the last state
        self._best = states.BestDigests()

    @staticmethod
    def written(folder: str) -> list[str]:
        """Return the paths of the files that a certified run may have in its folder."""
        names = certificate.FILE, SIGNATURE, certificate.MANIFEST, images.SALT
        return [os.path.join(folder, name) for name in names]

    def start(self, trainer: Trainer) -> None:
        """Digest the images, and record the start and the initial state. Collective."""
        world, folder, key = trainer.world, _folder(trainer), trainer.options.certify_key
        if key is not None:
            on_rank_0(world, lambda: signing.check_key(key))
        earlier_start, self._last = on_rank_0(world, lambda: _earlier(trainer))
        self._trainer = trainer
        if trainer.options.certify == "private":
            self.salt = self._read_salt(trainer, folder, earlier_start is None)
        data = self._describe_images(trainer)
        if earlier_start is not None:
            _refuse_other_images(earlier_start["data"], data)
        self._start = on_rank_0(world, lambda: start_entries(trainer, data, earlier_start))
        if self._validated not in trainer.writer.listeners:  # registered already if a rank was lost
            trainer.writer.listeners.append(self._validated)
        self._record_start(trainer.position.iteration)
        if self._last is None:
            self._record_state()

    def step(self, trainer: Trainer) -> None:
        """Record a state at the intervals of the options."""
        options, position = trainer.options, trainer.position
        if position.rollbacks and self._start["iteration"] >= position.iteration:
            self._record_start(position.iteration - 1)  # a rollback has removed the record
        intervals = [options.certify_every, options.checkpoint_keep]
        if options.on_nan == "rollback":  # an audit must know the states to roll back to
            intervals.append(options.checkpoint_every)
        is_due = any(n and position.iteration % n == 0 for n in intervals)
        if is_due and not trainer.at_epoch_end:
            self._record_state()

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        """Record the state at the end of an epoch."""
        self._record_state()

    def finish(self, trainer: Trainer) -> None:
        """Record the last state, unless the run was stopped and will continue from it."""
        stop = failure.agreed_signal(trainer.signals, trainer.world)
        if trainer.position.batch and stop in COMPLETE:
            self._record_state()

    def lost(self, trainer: Trainer) -> None:
        """After a loss of ranks, add the records that the lost rank 0 had not written."""
        position = trainer.position
        cut = metrics.Cut(position.iteration, trainer.validation.last_iteration)
        copies, self.copies = self.copies, {}
        written = on_rank_0(trainer.world, lambda: list(map(_place, _records(trainer))))
        for place, record in copies.items():
            if cut.keeps(record) and place in written:
                self.copies[place] = record
            elif cut.keeps(record):
                self._add(record)
        last_state = _last_state(self.copies.values())
        if last_state or (self._last and self._last[0] > position.iteration):
            self._last = last_state
        self._record_start(position.iteration)

    def end(self, trainer: Trainer) -> None:
        """Write the certificate of a complete run, unless `conclude` will. Collective."""
        if self.ends_with_training and trainer.stopped in COMPLETE:
            self._write(None)

    def conclude(
        self,
        world: World,
        folder: str | None,
        test: Evaluation | None = None,
        state: str = FINISHED,
    ) -> None:
        """Write the certificate of a run of the command, whose model is written. Collective.

        The parameters are those of `Tracker.conclude`.
        """
        if state == FINISHED:
            self._write(test)

    def abandon(self) -> None:
        """Leave the records of a failed run, from which it may be resumed."""

    def _read_salt(self, trainer, folder, is_new):
        path = os.path.join(folder, images.SALT)
        if not is_new and not on_rank_0(trainer.world, lambda: os.path.lexists(path)):
            raise UserError(f"{path}: expected the salt of the certificate of this run, found none")
        return images.salt_of(folder, trainer.world)

    def _describe_images(self, trainer):
        """Digest the images of the run, and return the entry `data`. Collective."""
        described: dict[str, Any] = {"validation": None}
        for name, (store, bad_images) in images_of(trainer).items():
            digests = self._digests(trainer, name, store, bad_images)
            if trainer.world.rank == 0 or trainer.world.outlives_ranks:
                described[name] = images.describe(store, digests)
                self.digests[name] = digests
        return trainer.world.broadcast(described)

    def _digests(self, trainer: Run, name: str, store: Datastore, bad_images: BadImages | None):
        count, hashed = len(store), 0
        with trainer.console.stage(f"digests of the {name} images", count) as advance:

            def progress(images: int) -> None:
                nonlocal hashed
                hashed += images * trainer.world.size
                advance(min(hashed, count))

            return images.digests(
                store,
                trainer.world,
                self.salt,
                name,
                progress=progress,
                bad_images=bad_images,
                workers=trainer.options.workers,
            )

    def _record_start(self, iteration):
        self._start = {**self._start, "iteration": iteration, "ranks": self._trainer.world.size}
        self._add({"kind": chain.PREFIX + chain.START, **self._start})

    def _record_state(self) -> None:
        """Record the current state, unless a resumed run already has its record. Collective."""
        trainer = self._trainer
        position = trainer.position
        trainer.wait()
        if self._last == (position.iteration, position.rollbacks):
            return
        self._last = position.iteration, position.rollbacks
        record = {"kind": chain.PREFIX + chain.STATE, "iteration": position.iteration}
        self._add(record | states.state_of(trainer) if trainer.world.rank == 0 else record)

    def _validated(self, record: Mapping[str, Any]) -> None:
        """Record a validation, of which the run's writer has received a record. Collective."""
        if record["kind"] != "validation":
            return
        is_first = self._trainer.world.rank == 0
        best = self._best.digests_of(self._trainer.validation.best) if is_first else {}
        scores = {name: metrics.number(record[name]) for name in ("loss", "accuracy")}
        position = {"kind": chain.PREFIX + chain.VALIDATION, "iteration": record["iteration"]}
        self._add({**position, **scores, "best": best})

    def _add(self, record: Record) -> None:
        """Write a record on rank 0. Collective."""
        trainer = self._trainer
        if trainer.world.outlives_ranks:
            record, place = trainer.world.broadcast(record), _place(record)
            self.copies.pop(place, None)  # a record from before a rollback
            self.copies[place] = record
        trainer.writer.add(metrics.Metrics.record_certificate, record)

    def _write(self, test: Evaluation | None) -> None:
        """Write the certificate and the manifest of the images. Collective."""
        trainer = self._trainer
        end, sets = self._end(test), dict(self.digests)
        if test is not None and self.test_images is not None:
            sets["test"] = self._digests(trainer, "test", self.test_images, _skipping(trainer))
            end["test"]["data"] = images.describe(self.test_images, sets["test"])

        def write():
            folder = _folder(trainer)
            subjects = {certificate.WEIGHTS: end["weights"]}
            if not self.ends_with_training:
                model = os.path.join(folder, certificate.MODEL)
                subjects[certificate.MODEL] = sha256_of_file(model)
            trainer.writer.raise_record_error()
            links = chain.build(_records(trainer), end)
            manifest = images.write_manifest(os.path.join(folder, certificate.MANIFEST), sets)
            path, salt = os.path.join(folder, certificate.FILE), images.salt_digest(self.salt)
            with contextlib.suppress(FileNotFoundError):  # the signature of an earlier certificate
                os.unlink(os.path.join(folder, SIGNATURE))
            certificate.write(path, links, subjects, manifest, salt)
            if trainer.options.certify_key is not None:
                signing.sign(path, trainer.options.certify_key)

        with trainer.console.stage("certificate"):
            trainer.writer.write(write)
        signed = "not signed" if trainer.options.certify_key is None else "signed"
        path = os.path.join(_folder(trainer), certificate.FILE)
        trainer.console.certificate(path, signed)

    def _end(self, test):
        """Return the last link, in which the images of the test are missing."""
        trainer = self._trainer
        loss, accuracy = trainer.validation.of_the_result()
        has_validation = trainer.validation.store is not None and loss is not None
        return {
            "iteration": trainer.position.iteration,
            "stopped": trainer.stopped,
            "returned_iteration": trainer.returned_iteration,
            "weights": model_file.weights_sha256(trainer.net),
            "validation": _scores(loss, accuracy) if has_validation else None,
            "test": None if test is None else _scores(test.loss, test.accuracy),
        }


def _scores(loss, accuracy):
    return {"loss": metrics.number(loss), "accuracy": metrics.number(accuracy)}


def images_of(trainer: Run) -> dict[str, tuple[Datastore, BadImages | None]]:
    """Return {name: (images, those that cannot be read)} of the sets of a run."""
    sets: dict[str, tuple[Datastore, BadImages | None]]
    sets = {"train": (trainer.datastore, trainer.bad_images)}
    if trainer.validation.store is not None:
        sets["validation"] = trainer.validation.store, trainer.validation.bad_images
    return sets


def start_entries(
    trainer: Run, data: Mapping[str, Any], earlier_start: Mapping[str, Any] | None = None
) -> Record:
    """Return the entries of a start, except for its place, on rank 0.

    Parameters
    ----------
    trainer : Run
        The run.
    data : mapping
        The entry `data`.
    earlier_start : mapping, optional
        The record of an earlier start of the same run.
    """
    net = trainer.net
    return {
        "software": sources.software(),
        "arithmetic": sources.arithmetic(trainer.world),
        "options": settings.options_of(trainer.options),
        "inputs": settings.inputs_of(trainer.facts.get("run", {})),
        "network": plain({"layers": net.spec(), "input_shape": net.input_shape, "loss": net.loss}),
        "optimizer": plain(trainer.optimizer_spec),
        "weights": _weights(trainer.facts.get("weights_file"), earlier_start),
        "data": data,
        "hooks": settings.custom_parts(trainer),
        "sweep": trainer.facts.get("sweep"),
    }


def _weights(file, earlier_start):
    """Return the entry `weights`: the file that the run started from, and its certificate."""
    if file is None:
        return None
    if earlier_start is not None and earlier_start["weights"] is not None:
        return earlier_start["weights"]
    path = os.path.join(os.path.dirname(file["path"]), certificate.FILE)
    with contextlib.suppress(OSError, UserError):
        with open_for_reading(path) as content:
            statement = json_object(content.read()) or {}
        digests = [item["digest"]["sha256"] for item in statement.get("subject", [])]
        if file["sha256"] in digests:
            return {"sha256": file["sha256"], "certificate": sha256_of_file(path)}
    return {"sha256": file["sha256"], "certificate": None}


def plain(value):
    """Return a value for JSON, in which infinite numbers and NaN are texts."""
    if isinstance(value, Mapping):
        return {str(name): plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def numbers_of(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a layer in which `plain` has replaced numbers by texts."""
    texts = "inf", "-inf", "nan"
    names = {key for key, value in layer.items() if isinstance(value, str) and value in texts}
    return {**layer, **{key: float(layer[key]) for key in names - {"name", "after"}}}


def _folder(trainer):
    """Return the folder of a run that can have a certificate."""
    option = f"--certify {trainer.options.certify}"
    if trainer.world.plain:
        raise UserError(
            f"{option}: expected a world whose sums do not depend on the number of ranks, found "
            "World(plain=True)"
        )
    if trainer.writer.out is None:
        raise UserError(f"{option}: expected a folder for the run, dl.train(..., out=FOLDER)")
    return os.fspath(trainer.writer.out)


def _records(trainer) -> list[Record]:
    """Return the records in the run's metrics.jsonl."""
    file = trainer.writer.metrics
    file.flush()
    return metrics.read(file.path)


def _earlier(trainer) -> tuple[Record | None, tuple[int, int] | None]:
    """Return the last start, and the place of the last state, that an earlier job recorded."""
    records = _records(trainer)
    starts = [record for record in records if record["kind"] == chain.PREFIX + chain.START]
    last_state = _last_state(records)
    if trainer.position.iteration and (not starts or last_state is None):
        raise UserError(
            f"--certify {trainer.options.certify}: expected the certificate's records of the run "
            f"so far in {metrics.FILE}, found none; resume the run in its folder"
        )
    return (starts[-1] if starts else None), last_state


def _last_state(records):
    """Return the iteration and the rollbacks of the last state in records, or None."""
    recorded = [record for record in records if record["kind"] == chain.PREFIX + chain.STATE]
    return (recorded[-1]["iteration"], recorded[-1]["rollbacks"]) if recorded else None


def _place(record):
    return record["kind"], record["iteration"]


def _refuse_other_images(before, now):
    """Raise UserError if a resumed run has other images than at its start."""
    for name, option in (("train", "--data"), ("validation", "--validation-data")):
        old, new = ((entry[name] or {}).get("root") for entry in (before, now))
        if old != new:
            raise UserError(
                f"--resume: {option}: the images, or {images.SALT}, are not those of the "
                f"certificate (root was {(old or 'none')[:12]}, is {(new or 'none')[:12]})"
            )


def _skipping(trainer):
    """Return where to collect test images that cannot be read, or None."""
    return type(trainer.bad_images)() if trainer.bad_images is not None else None
