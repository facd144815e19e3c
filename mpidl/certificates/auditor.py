"""All checks of an audit, and what explains the differences that they find."""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from mpidl.certificates import certificate as certificates
from mpidl.certificates import checks, images, segments, sources
from mpidl.certificates.chain import START
from mpidl.certificates.checks import DIFFERENT, EQUAL, OTHER, UNCHECKED, Finding
from mpidl.certificates.comparison import Comparison
from mpidl.certificates.covered import Point, load_covered, paths_of
from mpidl.certificates.replay import SILENT, Material, Replay, options_of
from mpidl.certificates.segments import Selection
from mpidl.data.loading.bad_images import BadImages
from mpidl.data.queue import epoch_images
from mpidl.errors import Fault, UserError
from mpidl.evaluation.validation import held_out
from mpidl.files import on_rank_0
from mpidl.nn import Network
from mpidl.ranks.failure import Signals, agreed_signal
from mpidl.ranks.world import World
from mpidl.report import Console, metrics
from mpidl.text import name_list, printable
from mpidl.training.files.folder_lock import FolderLock
from mpidl.training.optimizers.chain import AVERAGE
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.schedules import rate_of
from mpidl.training.session import Session

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore

# What explains a difference in a replay, if it differs too: {subject: cause}, the first one wins.
CAUSES = {
    "data": "the data",
    "options": "the options",
    "network": "the network",
    "initial weights": "the initial weights",
    "software": "the software",
}


class Audit(NamedTuple):
    """The result of `dl.audit`.

    Attributes
    ----------
    findings : tuple of Finding
        The results of all checks, each with `subject`, `verdict` and `text`.
    iterations : int
        Iterations of the run.
    replayed : int
        Iterations of the replays that agree with the certificate.
    head : str
        Digest of the last link, which identifies the certificate.
    """

    findings: tuple[Finding, ...]
    iterations: int
    replayed: int
    head: str

    @property
    def is_equal(self) -> bool:
        """Whether nothing that was checked differs from the certificate."""
        return not self.differing

    @property
    def differing(self) -> list[str]:
        """The subjects that differ from the certificate."""
        subjects = [f.subject for f in self.findings if f.verdict == DIFFERENT]
        return list(dict.fromkeys(subjects))

    @property
    def conclusion(self) -> str:
        """Whether anything differs, in one line."""
        if self.differing:
            return f"{DIFFERENT}: {name_list(self.differing)}"
        count = f"{self.replayed} of {self.iterations} iterations"
        text = f"{EQUAL}: nothing differs, {count} were replayed"
        unchecked = dict.fromkeys(f.subject for f in self.findings if f.verdict == UNCHECKED)
        return text + (f"; unchecked: {name_list([*unchecked])}" if unchecked else "")

    @property
    def last_lines(self) -> list[str]:
        """The head, unless the links are not those that it confirms, and the conclusion."""
        head = [] if "certificate" in self.differing else [f"head: {self.head}"]
        return [*head, self.conclusion]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.findings), *self.last_lines])


class Auditor:
    """The checks of one audit. All methods and the constructor are collective.

    Parameters
    ----------
    world : World
        The ranks of the auditor.
    run : path
        The folder of a run, or its certificate.
    report : callable
        Function that rank 0 calls with each finding.
    console : Console, optional
        Shows the progress.
    """

    def __init__(
        self,
        world: World,
        run: str | os.PathLike[str],
        report: Callable[[Finding], object] = lambda finding: None,
        console: Console | None = None,
    ) -> None:
        self.world, self.report = world, report
        self.console = console or SILENT
        path = certificates.locate(run)
        self.folder = os.path.dirname(path) or "."
        self.certificate = on_rank_0(world, lambda: certificates.read(path))
        self.findings: list[Finding] = []
        self.replayed = 0  # iterations that agree
        self.points: list[Point] = []

    def add(self, *findings: Finding) -> None:
        """Add findings, and report them."""
        self.findings += findings
        if self.world.rank == 0:
            for finding in findings:
                self.report(finding)

    def _check(self, check, *arguments):
        """Add the finding of a check that rank 0 makes."""
        self.add(on_rank_0(self.world, lambda: check(*arguments)))

    def verdict_on(self, subject: str) -> str:
        """Return the verdict on a subject, `DIFFERENT` if any finding about it is."""
        verdicts = [f.verdict for f in self.findings if f.subject == subject]
        return DIFFERENT if DIFFERENT in verdicts else (verdicts or [UNCHECKED])[0]

    @property
    def result(self) -> Audit:
        """The findings so far."""
        iterations = self.certificate.end["iteration"]
        return Audit(tuple(self.findings), iterations, self.replayed, self.certificate.head)

    def check_files(
        self, signers: str | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        """Check the certificate and the files beside it, but not the checkpoints."""
        certificate = self.certificate
        self._check(checks.check_chain, certificate)
        self._check(checks.check_signature, certificate.path, signers)
        if certificate.disorder is not None:
            return
        self._check(checks.check_software, certificate)
        self._check(checks.check_model, certificate, self.folder)
        self._check(checks.check_options, certificate, options)
        self.add(*checks.check_starts(certificate), *checks.check_hooks(certificate))

    def check_arithmetic(self) -> None:
        """Compare what the run computed with, and what the ranks compute with."""
        current = sources.arithmetic(self.world)
        self._check(checks.check_arithmetic, self.certificate, current)

    def check_checkpoints(self, folder: str | None = None) -> None:
        """Check the checkpoints in a folder, by default that of the certificate."""
        place = folder or self.folder

        def check():
            if folder is not None and not os.path.isdir(folder):
                raise UserError(f"--checkpoints {printable(folder)}: no such folder")
            return checks.check_checkpoints(self.certificate, paths_of(place))

        findings, points = on_rank_0(self.world, check)
        self.add(*findings)
        self.points = points

    def read_salt(self, path: str | None) -> bytes | None:
        """Return the salt of the digests, or None if they have none."""
        expected = self.certificate.salt
        if expected is None:
            return None
        place = path or os.path.join(self.folder, images.SALT)

        def read():
            if path is None and not os.path.lexists(place):
                raise UserError(
                    f"{printable(place)}: expected the salt of the digests, which an auditor gets "
                    "from the owner of the run; --salt FILE names another file"
                )
            salt = images.read_salt(place)
            if images.salt_digest(salt) != expected:
                raise UserError(
                    f"{printable(place)}: expected the salt with sha256 {checks.short(expected)}, "
                    f"as in the certificate, found {checks.short(str(images.salt_digest(salt)))}"
                )
            return salt

        return on_rank_0(self.world, read)

    def check_data(
        self, sets: Mapping[str, Datastore | None], options: TrainingOptions, salt: bytes | None
    ) -> None:
        """Compare the digests of images with those of the run."""
        recorded, world = checks.sets_of(self.certificate), self.world
        manifest = on_rank_0(world, lambda: checks.read_manifest(self.certificate, self.folder))
        if manifest.finding is not None:
            self.add(manifest.finding)
        for name, described in recorded.items():
            store = sets.get(name)
            if store is None and name == "validation":
                raise UserError(
                    f"--validation-data (in Python options.validation): expected the "
                    f"{described['images']} images of the run, found none"
                )
            if store is None:
                self.add(Finding("data", UNCHECKED, f"{name}: there are no such images"))
                continue
            with self.console.stage(f"digests of the {name} images", len(store)) as advance:
                digests = images.digests(
                    store,
                    world,
                    salt,
                    name,
                    progress=_counted(advance, world.size, len(store)),
                    bad_images=BadImages.of_options(options),
                    workers=options.workers,
                )
            expected = manifest.digests.get(name)
            self._check(checks.check_images, name, described, store, digests, expected, salt)
        for name in {"train", "validation"} - recorded.keys():
            if sets.get(name) is not None:
                self.add(Finding("data", DIFFERENT, f"{name}: the run had no such images"))

    def compare(
        self, material: Material, source: checks.Source, test: Datastore | None, salt: str | None
    ) -> None:
        """Compare the images and the network of a material with those of the run."""
        train, options = self._options(self.certificate.of_kind(START)[-1], material)
        with FolderLock(self.world) as lock:  # choose the device
            Session(self.world, lock).use_options(options, SILENT)
        self.check_arithmetic()
        sets = {"train": train, "validation": options.validation, "test": test}
        self.check_data(sets, options, self.read_salt(salt))
        self.check_network(material.network(), source)

    def _options(self, start, material):
        """Return the images to train on, and the options of a start."""
        options = options_of(self.certificate, start, material.replaced)
        return held_out(material.train, options)

    def check_weights(self, path: str) -> None:
        """Compare the file of weights that the run began with."""
        self._check(checks.check_weights, self.certificate, path)

    def check_network(self, net: Network, source: checks.Source) -> None:
        """Compare a new network with that of the run, and its weights with the first state."""
        self._check(checks.check_network, self.certificate, net)
        if self.verdict_on("network") != DIFFERENT:
            self._check(checks.check_initial_weights, self.certificate, net, source)

    def replay(
        self, material: Material, selection: Selection, signals: Signals, test: Datastore | None
    ) -> None:
        """Replay the selected segments, and then the test if a replay has reached the end."""
        reason = self._reason_to_skip()
        if reason is not None:
            self.add(Finding("iterations", UNCHECKED, f"not replayed, because {reason}"))
            return
        end = self.certificate.end["iteration"]
        selected = self._segments(selection, material)
        replay = Replay(self.world, self.certificate, material, signals)
        for group in segments.adjacent(selected):
            self._replay_group(replay, group)
        if replay.net is not None and selected[-1][1] == end:
            last = self.findings[-1]
            if last.verdict == EQUAL:
                self._test(replay.net, material, signals, test)
        if selected[-1][1] < end:
            self.add(Finding("results", UNCHECKED, "the end of the run was not replayed"))

    def _reason_to_skip(self):
        if self.certificate.disorder is not None:
            return "the links do not have the order of a run"
        if self.verdict_on("software") == DIFFERENT:
            return "this mpidl has another arithmetic"
        train = [f for f in self.findings if f.subject == "data" and f.verdict == DIFFERENT]
        if any(not finding.text.startswith("test:") for finding in train):
            return "the data differ"
        return None

    def _segments(self, selection, material):
        """Return the segments to replay, in order."""
        starts = sorted({0, *(point.iteration for point in self.points)})
        if selection.steps is not None:
            return [segments.around(self.certificate, starts, selection.steps)]
        candidates = segments.all_segments(starts, self.certificate.end["iteration"])
        if not selection.is_part():
            return candidates
        # The end follows from the last segment, and the returned network from a validation.
        returned, count = self.certificate.end["returned_iteration"], len(candidates)
        selected = {candidates[-1], *(s for s in candidates if s[0] < returned <= s[1])}
        if selection.sample is not None:
            seed = selection.seed
            if seed is None:
                seed = self.world.broadcast(secrets.randbits(63))
            drawn = segments.draw(candidates, selection.sample, seed)
            text = f"{len(drawn)} of {count} segments, drawn by --seed {seed}"
            added = len(selected - drawn)
            text += f", and {added} in which the result was formed" if added else ""
            self.add(Finding("sample", EQUAL, text))
            selected |= drawn
        if selection.largest is not None:
            before_last = candidates[:-1]
            largest = on_rank_0(
                self.world, lambda: self._farthest(before_last, selection.largest, material)
            )
            text = f"{len(largest)} of {count} segments, in which the weights moved farthest"
            text += ", those before them, and those in which the result was formed"
            self.add(Finding("largest", EQUAL, text))
            # A forged momentum moves the weights in the next segment.
            begins = {first for first, _ in largest}
            selected |= largest | {s for s in candidates if s[1] in begins}
        return sorted(selected)

    def _farthest(self, candidates, count, material):
        """Return segments with large distances, by the checkpoints. Only rank 0 calls this."""
        points = {point.iteration: point.path for point in self.points}
        starts = {start["iteration"]: start for start in self.certificate.of_kind(START)}
        all_options = {n: self._options(start, material)[1] for n, start in starts.items()}
        images, options = self._options(starts[max(starts)], material)
        full, rest = divmod(epoch_images(images, options.sampling), options.batch_size)
        per_epoch = max(full + (rest > 0 and options.partial_minibatch == "return"), 1)

        def weights_at(iteration):
            path = points.get(iteration)
            if path is None and iteration:
                return None
            learnables, averages = material.network().parameters, {}
            if path is not None:
                if (loaded := load_covered(path, self.certificate)) is None:
                    return None
                learnables, averages = loaded.arrays["learnables"], loaded.arrays["optimizer"]
            # The run may return an average of the weights, which begins with them.
            copies = {f"{AVERAGE}.{name}": array for name, array in learnables.items()}
            return {**learnables, **{n: averages.get(n, array) for n, array in copies.items()}}

        def rate(iteration):
            options = all_options[max(n for n in starts if n < iteration)]
            return rate_of(options, (iteration - 1) // per_epoch + 1, iteration, per_epoch)

        return segments.farthest(candidates, count, weights_at, rate)

    def _replay_group(self, replay, group):
        """Replay adjacent segments at once; after a difference, go on from the next point."""
        points = {point.iteration: point for point in self.points}
        while group:
            first = group[0][0]
            point = points.get(first)
            is_initial = self.verdict_on("initial weights") in (EQUAL, UNCHECKED)
            if first == 0 and (point is None or is_initial):
                point = Point(0)
            if point is None:
                text = "not replayed: there is no state to start from"
                self.add(Finding(_name(group[0]), UNCHECKED, text))
                return
            reported: list[Finding] = []
            times = {first: time.monotonic()}

            def passed(iteration, group=group, reported=reported, times=times):
                segment = next(s for s in group if s[1] == iteration)
                times[iteration] = time.monotonic()
                seconds = times[iteration] - times[segment[0]]
                finding = Finding(_name(segment), EQUAL, f"{seconds:.1f} s")
                reported.append(finding)
                self.report(finding)

            stops = [segment[1] for segment in group]
            difference = self._run(replay, point, stops, passed)
            agreed = self.world.broadcast(reported)
            self.findings += agreed
            self.replayed += sum(last - first for first, last in group[: len(agreed)])
            if difference is None:
                for segment in group[len(agreed) :]:
                    self.add(Finding(_name(segment), DIFFERENT, "the replay ended before its end"))
                return
            self._refuse_unknown_weights(point, difference)
            failed = next(s for s in group if s[1] >= min(difference.iteration, stops[-1]))
            self.add(Finding(_name(failed), DIFFERENT, self._explained(difference)))
            group = [s for s in group if s[0] >= failed[1] and s != failed]

    def _run(self, replay, point, stops, passed):
        first, last = point.iteration, stops[-1]
        name, count = f"replay of {_name((first, last))}", last - first
        with self.console.stage(name, count, "iterations") as advance:
            comparison = Comparison(
                self.certificate, stops, passed, lambda iteration: advance(iteration - first)
            )
            difference = replay.run(point, comparison)
        if replay.stopped is not None:
            raise Stopped(f"{replay.stopped}: the audit was stopped")
        return difference

    def _refuse_unknown_weights(self, point, difference):
        """Raise UserError if a replay began with weights that the certificate does not claim."""
        is_initial = point.path is None and difference.iteration == 0
        if is_initial and self.verdict_on("initial weights") == OTHER:
            raise UserError(
                "--network (in Python net=): expected the network with the weights that the run "
                f"began with, which are not those of {checks.seed_of(self.certificate).text}"
            )

    def _explained(self, difference):
        """Return the text of a difference with its cause."""
        text = f"from iteration {difference.iteration} on: {difference.text}"
        return f"{text}; cause: {self._cause()}"

    def _cause(self):
        for subject, cause in CAUSES.items():
            if self.verdict_on(subject) == DIFFERENT:
                return cause
        if self.verdict_on("arithmetic") == OTHER:
            return "the arithmetic of this machine"
        if failures := self._golden_failures:
            return f"the arithmetic of this machine: golden hashes differ ({name_list(failures)})"
        cause = "the certificate: its states do not follow from this data and these options"
        if self.verdict_on("hooks") == OTHER:
            cause += ", or the hooks of the run changed it"
        if self.verdict_on("software") == OTHER:
            cause += ", or other sources of mpidl"
        return cause

    @functools.cached_property
    def _golden_failures(self):
        """The names of the golden trainings with other weights on any rank."""
        from mpidl.training import golden

        failures = []
        with self.console.stage("golden hashes"):
            try:
                failures = [o.name for o in golden.check() if o.actual != o.expected]
            except (UserError, Fault):  # there are no hashes for this arithmetic, or a signal
                pass
            ranks = self.world.allgather(failures)
        return list(dict.fromkeys(name for names in ranks for name in names))

    def _test(self, net, material, signals, test):
        """Compare the test of the final network with that of the run."""
        from mpidl.evaluation.evaluate import evaluate

        recorded = self.certificate.end["test"]
        if recorded is None:
            return
        if test is None:
            self.add(Finding("test", UNCHECKED, "there are no test images"))
            return
        train, options = self._options(self.certificate.of_kind(START)[-1], material)
        with self.console.stage("test", len(test)) as advance:
            scores = evaluate(
                net,
                test,
                world=self.world,
                loss=options.loss_for(net, train, self.world),
                progress=advance,
                bad_images=BadImages.of_options(options),
                test_flips=options.test_flips,
                signals=signals,
            )
        if (stop := agreed_signal(signals, self.world)) is not None:
            raise Stopped(f"{stop}: the audit was stopped")
        values = {name: metrics.number(getattr(scores, name)) for name in ("loss", "accuracy")}
        pairs = [f"{n} is {v}, was {recorded[n]}" for n, v in values.items() if v != recorded[n]]
        text = ", ".join(pairs) or f"{len(test)} images"
        self.add(Finding("test", DIFFERENT if pairs else EQUAL, text))


class Stopped(Fault):
    """Raised if a signal stops an audit."""


def _counted(advance, ranks, count):
    """Return a function that estimates the images of all ranks from those of rank 0."""
    total = 0

    def progress(images: int) -> None:
        nonlocal total
        total += images * ranks
        advance(min(total, count))

    return progress


def _name(segment):
    return f"iterations {segment[0]}-{segment[1]}"
