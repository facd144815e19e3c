"""The training that `python -m mpidl.train` runs: train, test, and write the results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mpidl.cli import arguments, pretrained, remote, start, train_data, train_results, user_files
from mpidl.data.loading.bad_images import BadImages
from mpidl.data.urls import refuse_remote
from mpidl.files import on_rank_0
from mpidl.ranks import failure, survival
from mpidl.ranks.world import World
from mpidl.report import status
from mpidl.report.run_files import OPTIONS
from mpidl.training import (
    input_pipeline,
    live_page,
    lost_ranks,
    progress,
    status_hooks,
    tracking,
)
from mpidl.training.files import checkpoint, model_file, resume_changes
from mpidl.training.files.folder_lock import FolderLock
from mpidl.training.files.run_folder import COMMAND_WORDS
from mpidl.training.options import configuration, training_options
from mpidl.training.session import Session
from mpidl.training.trainer import Trainer

if TYPE_CHECKING:
    from mpidl.report.live.address import Address


def run(typed: Mapping[str, Any]) -> int:
    """Start the ranks' world, train, and return the exit code. `typed` as for `train`."""
    # This time-out applies until --config and the checkpoint have been read.
    world = World(
        timeout=typed.get("timeout", training_options.TrainingOptions().timeout), threads=None
    )
    with failure.Signals() as signals, FolderLock(world) as lock:
        return train(typed, world, signals, lock)


def train(
    typed: Mapping[str, Any],
    world: World,
    signals: failure.Signals,
    lock: FolderLock,
    hooks: Iterable[object] = (),
) -> int:
    """Train a network as the command does, and return the exit code. Collective.

    Parameters
    ----------
    typed : mapping
        The result of `arguments.train`.
    world : World
        The ranks that train.
    signals : Signals
        Requests to stop.
    lock : FolderLock
        Lock of the results folder. This function takes the lock if the caller has not taken it.
    hooks : iterable of object, optional
        Hooks in addition to those of the options.
    """
    training = Training(typed, world, signals, lock)
    training.resolve_options()
    training.open_data()
    if "preview" in typed:
        return train_data.draw_preview(typed["preview"], training.images, training.session)
    training.build_network()
    training.prepare_folder()
    training.announce()
    return training.train(hooks)


def _open_session(typed, world, lock):
    """Return the session of the run. A preview only reads the checkpoint, and locks no folder."""

    def refuse_urls():
        for name, kind in (("out", "a folder"), ("resume", "a folder"), ("preview", "a file")):
            refuse_remote(typed.get(name), training_options.flag(name), kind)

    on_rank_0(world, refuse_urls)
    out, resume = typed.get("out"), typed.get("resume")
    if "preview" in typed:
        out, resume = None, resume and on_rank_0(world, lambda: checkpoint.load(resume))
    overwrite = typed.get("overwrite", False)
    return Session(world, lock, out, resume, overwrite=overwrite, words=COMMAND_WORDS)


class Training:
    """One training, in phases that `train` calls from top to bottom. All phases are collective.

    The probe of a scaling study calls the first phases too.
    """

    def __init__(
        self, typed: Mapping[str, Any], world: World, signals: failure.Signals, lock: FolderLock
    ) -> None:
        self.typed, self.world, self.signals = typed, world, signals
        self.session = _open_session(typed, world, lock)

    def resolve_options(self):
        """Resolve the options; settle the device and open the console."""
        typed, world, session = self.typed, self.world, self.session
        self.saved = None if session.checkpoint is None else session.checkpoint[1]
        self.resolved = on_rank_0(
            world,
            lambda: configuration.resolve(typed, config=typed.get("config"), resumed=self.saved),
        )
        self.options, self.run = self.resolved.options.for_ranks(world.size), self.resolved.run
        self.network_file = on_rank_0(world, self._network_file)
        remote.configure(self.run, world)
        world.transport.timeout = self.options.timeout
        self.notes = session.use_options(self.options)  # lines to print before training

    def _network_file(self):
        """Return the facts of the Python file of --network, or None without a file."""
        network = self.run["network"]
        if self.resolved.sources["network"] == "resumed run":
            user_files.check_resumed(network, self.saved or {}, self.typed["resume"])
        return user_files.network_file(network)

    def open_data(self):
        """Open the training, validation and test images, and the network of --weights."""
        self.images = train_data.open_images(self.typed, self.resolved, self.options, self.session)
        self.sets, self.options, self.source, notes = self.images
        self.notes += notes

    def build_network(self):
        """Build the network, or complete that of --weights; check it against a resumed run."""
        train_set, source, options = self.sets.train, self.source, self.options
        options.load(self.world.size)  # raises if worker_load does not fit the ranks
        if source is None:
            shape = input_pipeline.image_shape(options, train_set.image_shape)
            self.net = start.network_for(self.run["network"], shape, train_set, options)
        else:
            pretrained.check_shape(source, train_set, options)
            self.net, self.options, self.resolved = pretrained.network(
                source, self.resolved, options, train_set
            )
        self.weights_file = None if source is None else source.file
        input_pipeline.check(self.net, train_set, self.options)
        if self.saved is not None:
            now = resume_changes.resumable(self.options, self.net, train_set, self.world.size)
            # Check here, because the trainer checks only after the output folder has changed.
            resume_changes.refuse_changes(self.saved, now, f"the run in {self.typed['resume']}")

    def prepare_folder(self):
        """Open the recorders and the live page, and lock the folder of the run."""
        self.recorders = tracking.requested(self.options, self.run, test_images=self.sets.test)
        for recorder in self.recorders:
            recorder.ends_with_training = False
        self.page = live_page.open_page(self.world, self.typed.get("monitor"), "--monitor")
        self.title = pretrained.title(self.run)
        self.session.make_folder(self.title)
        self.out = self.session.folder

    def announce(self):
        """Print notes, warnings and what is trained on what, and write options.toml."""
        world, options, console = self.world, self.options, self.session.console
        notes = [
            *self.notes,
            *_rank_dependence(options, world),
            *world.use_threads(options.threads),
        ]
        for line in [*start.warnings(world, options.batch_size), *notes]:
            console.line(line)
        learnables = sum(count for *_, count in self.net.table())
        weights = {}
        if self.source is not None:
            weights = pretrained.describe(self.source, self.run, self.net, self.sets.train)
        sets = {"data": self.sets.train, "validation": self.sets.validation, "test": self.sets.test}
        hosts = len(set(world.hosts))
        on = f" on {hosts} hosts" if hosts > 1 else ""
        threads = "-".join(map(str, sorted({min(world.threads), max(world.threads)})))
        threads += f" thread{'' if threads == '1' else 's'} each"
        precision = "" if options.precision == "fp32" else f" in {options.precision}"
        console.header(
            network=f"{self.title}, {len(self.net.layers)} layers, {learnables:,} learnables",
            **weights,
            **{name: images.describe() for name, images in sets.items() if images is not None},
            ranks=f"{world.size}{on}, {start.device_of(world)}{precision}, {threads}",
            results=self.out,
        )
        if self.saved is not None:
            position = self.saved["position"]
            text = train_results.describe_position(position, options)
            console.line(f"Resumed after iteration {position['iteration']}, {text}")
        on_rank_0(world, self._write_options)

    def _write_options(self):
        versions = configuration.versions_of(self.world.transport.MPI.Get_library_version())
        path = os.path.join(self.out, OPTIONS)
        configuration.write_options(path, self.resolved, versions, self.weights_file)

    def train(self, hooks: Iterable[object] = ()) -> int:
        """Train and test the network, and write the results; return the exit code."""
        world, session, lock = self.world, self.session, self.session.lock
        facts = {"weights_file": self.weights_file, "network_file": self.network_file}
        facts["sweep"] = self.typed.get("sweep") or (self.saved or {}).get("sweep")
        page_hooks = [_PageHook(self.page)] if "monitor" in self.typed else []
        with (
            session.active(self.recorders, self.signals),
            # The page must close after the status hook to show the final status.
            live_page.served(self.page, self.out, session.console.line),
            status_hooks.StatusHook(self.out, world, lock) as self.status_hook,
        ):
            self.result = session.train(
                self.net,
                self.sets.train,
                self.options,
                [*self.recorders, self.status_hook, *page_hooks, *hooks],
                facts={"run": self.run, **{name: value for name, value in facts.items() if value}},
            )
            return survival.attempt(
                world, self._conclude, lambda: lost_ranks.restart_test(session, self.result)
            )

    def _conclude(self):
        """Test the network and write the results; return the exit code."""
        stopped, self.test = self.result.stopped, None
        self.skipped = BadImages.of_options(self.options)  # images of the test set
        if stopped in (None, progress.PATIENCE):
            if self.sets.test is not None:
                self.test = train_results.test_network(
                    self.net,
                    self.sets.train,
                    self.sets.test,
                    self.options,
                    self.session,
                    self.skipped,
                )
            stopped = failure.agreed_signal(self.signals, self.world)
        self.session.lock.confirm()
        return self._end_stopped(stopped) if stopped else self._end_finished()

    def _end_stopped(self, stopped):
        """Say how to continue the run that a signal or a user has stopped."""
        console = self.session.console
        self.status_hook.status.stopped = stopped
        problem = tracking.concluded(self.recorders, self.world, None, state=status.STOPPED)
        console.close()
        if problem is not None:
            console.line(f"warning: {problem}")
        console.line(
            f"{stopped}: stopped at iteration {self.result.iterations}, checkpoint written; "
            f"to continue, run again with --resume {self.out}"
        )
        return arguments.STOPPED

    def _end_finished(self):
        """Write, print and upload the results of a finished run."""
        world, console, upload = self.world, self.session.console, self.run["upload"]
        for line in train_results.describe_validation(self.result, self.options):
            console.line(line)
        with console.stage("writing the results"):
            on_rank_0(world, self._write_results)
            problem = tracking.concluded(self.recorders, world, self.out, self.test)
        console.finish(self.out, self.result.train_seconds, self.test)
        console.line(f"weights_sha256: {model_file.weights_sha256(self.net)}")
        if upload is not None:
            with console.stage("uploading the results"):
                on_rank_0(world, lambda: remote.upload(self.out, upload))
            console.line(f"Uploaded: {upload}")
        if problem is not None:
            raise problem
        return 0

    def _write_results(self):
        train_results.write_results(
            self.net,
            self.result,
            self.test,
            skipped=0 if self.skipped is None else len(self.skipped),
            weights_file=self.weights_file,
            session=self.session,
        )


class _PageHook:
    """Hook that reports that the live page has ended, because its rank is lost."""

    def __init__(self, page: Address | None) -> None:
        self.page = page

    def lost(self, run: Trainer) -> None:
        if self.page is None:
            run.console.line(
                "warning: --monitor: the page has ended with its rank; python -m mpidl.monitor "
                f"{run.writer.out} shows the run"
            )


def _rank_dependence(options, world):
    """Return notes about options with which the weights depend on the number of ranks."""
    lines = []
    if options.sampling == "partition":
        lines.append(
            f"note: --sampling partition: the images are partitioned among {world.size} "
            "rank(s); on another number of ranks, the weights differ"
        )
    if options.batch_per_rank is not None:
        lines.append(
            f"note: --batch-per-rank {options.batch_per_rank}: mini-batches of "
            f"{options.batch_size} on {world.size} rank(s); on another number, the weights differ"
        )
    return lines
