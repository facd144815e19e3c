"""`python -m mpidl.audit`: check a certified run, and replay parts of it."""

import argparse
import copy
import functools
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from mpidl.certificates import audit, checks, settings, states
from mpidl.certificates.auditor import Auditor, Stopped
from mpidl.certificates.certificate import Certificate
from mpidl.certificates.chain import START, STATE
from mpidl.certificates.checks import Finding
from mpidl.certificates.replay import NEUTRAL, Material, options_of
from mpidl.certificates.segments import SEED, Selection
from mpidl.cli import arguments, start, train_data, train_run, user_files
from mpidl.cli.parser import RUN, Parser
from mpidl.errors import UserError
from mpidl.files import on_rank_0
from mpidl.nn import zoo
from mpidl.options.declaration import check_value, flag, rule_of
from mpidl.ranks import failure
from mpidl.ranks.world import World
from mpidl.report import Console
from mpidl.report.progress.terminal import terminal_width
from mpidl.training.files.folder_lock import FolderLock
from mpidl.training.options import training_options
from mpidl.training.options.run_inputs import INPUTS
from mpidl.training.options.training_options import OPTIONS

EXIT_CODES = """\
exit codes: 0 nothing differs from the certificate; 1 something differs, or an error; 2 invalid
options, or a file that is not a certificate; 75 stopped by a signal (USR1, TERM, INT)
"""
COMMON = """
data validation_data steps sample seed largest salt signers
""".split()
# Inputs and options of a run that the auditor chooses.
SETS = ("data", "validation_data", "test_data")
SPEED = ("device", "gpus", "graphs", "threads", "workers", "prefetch", "cache_mb", "timeout")


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.audit; `arguments.train` describes parameters and errors.

    The attributes selection and typed are a `Selection`, and a dict {name: value} of the typed
    inputs and options of the run.
    """
    parser = Parser(
        "mpidl.audit",
        "Check a certified run: its certificate, its files and its data, and replay parts of the\n"
        "training on all ranks that mpirun or srun started. The weights must have the same bytes.",
        quiet,
        COMMON,
        RUN,
        epilog=EXIT_CODES,
    )
    parser.add_argument("run", metavar="RUN", help="The folder of a run, or its certificate.json")
    parser.text("--steps", "A:B", "Replay these iterations; default: all iterations")
    parser.number(
        "--sample",
        "Replay K segments, drawn at random, and those in which the result was formed. A segment "
        "is between two states from which a replay can start (train --checkpoint-keep)",
        metavar="K",
    )
    parser.text("--seed", "N", "Seed of --sample; default: a new seed, which is printed", type=SEED)
    parser.number(
        "--largest",
        "Replay the K segments in which the weights moved farthest for their learning rates, those "
        "before them, and those in which the result was formed",
        metavar="K",
    )
    parser.add_options(
        *SETS,
        "weights",
        "network",
        data="the data of the certificate, if they are embedded",
        network="the layers of the certificate",
    )
    parser.text("--layers", "FILE.py", "Python file with the network's custom layer classes")
    parser.text(
        "--salt",
        "FILE",
        "The salt of the digests of the images; default: certificate-salt.txt beside the "
        "certificate",
    )
    parser.text(
        "--signers",
        "FILE",
        "Keys that may sign the certificate: a public key, or ssh-keygen's list of allowed signers",
    )
    parser.text("--checkpoints", "DIR", "Folder with checkpoints of the run; default: RUN")
    parser.add_options(*arguments.STORAGE, *SPEED)
    values = vars(parser.parse(argv))
    numbers = {name: values.pop(name) for name in ("steps", "sample", "seed", "largest")}
    selection = Selection.of_arguments(**numbers)
    typed = {name: values.pop(name) for name in tuple(values) if name in OPTIONS | INPUTS}
    return argparse.Namespace(**values, selection=selection, typed=typed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    timeout = parsed.typed.get("timeout", training_options.TrainingOptions().timeout)
    world = World(timeout=timeout, threads=None)
    # Findings go to stdout. On a terminal, the progress does too, so that they do not mix. With a
    # pipe, it has whole lines, because the pipe may lead to the same terminal.
    width = terminal_width(sys.stdout)
    console = Console(
        world.rank, stream=sys.stdout if width else sys.stderr, width=None if width else 0
    )
    with failure.Signals() as signals, FolderLock(world) as lock, console:
        report = functools.partial(print_line, console)
        auditor = Auditor(world, parsed.run, report, console)
        try:
            Command(parsed, auditor, signals, lock).run()
        except Stopped as error:
            console.close()
            if world.rank == 0:
                print(f"mpidl: {error}", file=sys.stderr)
            return arguments.STOPPED
        result = auditor.result
        if world.rank == 0:
            for line in result.last_lines:
                print_line(console, line)
    return 0 if result.is_equal else 1


def print_line(console: Console, text: Finding | str) -> None:
    """Print a line to stdout, on a terminal above the progress and in short lines."""
    if console.stream is not sys.stdout:
        print(text, flush=True)
        return
    lines = textwrap.wrap(
        str(text),
        console.width,
        subsequent_indent=" " * (checks.SUBJECT_COLUMNS + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        console.line(line)


class Command:
    """The work of the command.

    Parameters
    ----------
    parsed : Namespace
        The result of `parse`.
    auditor : Auditor
        The checks.
    signals : Signals
        Requests to stop.
    lock : FolderLock
        A lock that is not taken, because an audit writes no files.
    """

    def __init__(
        self,
        parsed: argparse.Namespace,
        auditor: Auditor,
        signals: failure.Signals,
        lock: FolderLock,
    ) -> None:
        self.parsed, self.auditor, self.signals, self.lock = parsed, auditor, signals, lock
        self.world = auditor.world

    def run(self) -> None:
        """Make all checks."""
        parsed, auditor = self.parsed, self.auditor
        auditor.check_files(parsed.signers)
        if auditor.certificate.disorder is not None:
            return
        auditor.check_checkpoints(parsed.checkpoints)
        # Every rank needs the custom layers.
        layers = user_files.user_layers(parsed.layers)
        training = self._open()
        material, source = self._material(training, layers)
        auditor.compare(material, source, training.sets.test, parsed.salt)
        auditor.replay(material, parsed.selection, self.signals, training.sets.test)

    def _open(self):
        """Open the images, and the network of --weights, as the command `train` does."""
        first = self.auditor.certificate.of_kind(START)[0]
        if first["optimizer"] is not None:
            raise UserError(
                f"{self.auditor.certificate.path}: the run had an optimizer of a Python program: "
                "use dl.audit"
            )
        typed = on_rank_0(self.world, lambda: typed_of(self.auditor.certificate, self.parsed.typed))
        training = train_run.Training(typed, self.world, self.signals, self.lock)
        training.resolve_options()
        last = self.auditor.certificate.of_kind(START)[-1]
        names = {name: typed[name] for name in SPEED if name in typed}
        training.options = options_of(self.auditor.certificate, last, names)
        self._open_images(training, last["data"]["train"]["images"])
        lines = [*training.notes, *self.world.use_threads(training.options.threads)]
        for line in [*start.arithmetic(self.world), *lines]:
            print(line, file=sys.stderr)
        return training

    def _open_images(self, training, count):
        """Open the images. `count` is the number of those that the run trained on."""
        options, resolved = training.options, training.resolved
        training.open_data()
        is_split = resolved.run["test_data"] is None and resolved.run["test_fraction"]
        if is_split and len(training.sets.train) != count:
            # The test images were in --data of the run, but they may not be in that of the auditor.
            untested = resolved._replace(run={**resolved.run, "test_fraction": 0.0})
            images = train_data.open_images(training.typed, untested, options, training.session)
            if len(images.sets.train) == count:
                training.sets, training.options, training.source, _ = images

    def _material(self, training, layers):
        """Return the material of the audit, and what gave the initial weights."""
        certificate, typed = self.auditor.certificate, self.parsed.typed
        stored = None
        if training.source is not None:
            self.auditor.check_weights(training.source.file["path"])
            stored = training.source.net.normalization
        if training.source is not None or ".py:" in (typed.get("network") or ""):
            training.build_network()
            network = training.net
            self._use_statistics(network, stored)
            source = checks.Source(str(typed.get("weights") or typed.get("network")))
        else:
            network = audit.network_of(certificate, layers)
            source = checks.seed_of(certificate)
        names = {name: training.options for name in SPEED}
        replaced = {name: getattr(options, name) for name, options in names.items()}
        replaced["validation"] = training.options.validation
        material = Material(
            training.sets.train, lambda: copy.deepcopy(network), replaced, lambda: None
        )
        return material, source

    def _use_statistics(self, net, normalization):
        """Give a network the statistics of its weight file, unless the run measured its own."""
        if net.normalization is None and normalization is not None and normalization.is_known:
            arrays = normalization.window(net.input_shape[1:]).arrays()
            digests = self.auditor.certificate.of_kind(STATE)[0]["tables"]
            if states.table_digest("normalization", arrays) == digests.get("normalization"):
                net.normalization = normalization


def typed_of(certificate: Certificate, typed: dict[str, Any]) -> dict[str, Any]:
    """Return the options and inputs of a run, as if the auditor had typed them.

    A certificate has no paths, and the Python code that it names is not run.

    Raises
    ------
    UserError
        If the auditor must say where images or weights are.
    """
    first = certificate.of_kind(START)[0]
    texts, inputs = certificate.of_kind(START)[-1]["options"], first["inputs"]
    values = {
        name: settings.value_of(name, text)
        for name, text in texts.items()
        if name in OPTIONS and name not in NEUTRAL and not text.startswith(settings.FUNCTION)
    }
    for name, text in inputs.items():
        if name not in INPUTS:
            raise UserError(f"{certificate.path}: unknown input {name:.50}")
        values[name] = check_value(rule_of(INPUTS[name]), text, flag(name), text=True)
    values |= {"verbose": "off", "plots": "none", **typed}
    _need_sets(certificate, values)
    # The run would have refused these values if its user had typed them.
    values.pop("validation_frequency", None)
    if values.get("test_fraction") == INPUTS["test_fraction"].default:
        del values["test_fraction"]
    if "test_data" not in values or not inputs:
        # The test images were at a path, or there were none.
        values["test_data"] = values.get("test_data")
        if values["test_data"] is None:
            values["test_fraction"] = 0.0
    if first["weights"] is None and "weights" in typed:
        raise UserError(f"--weights {typed['weights']}: the run did not start from weights")
    if first["weights"] is not None and "weights" not in typed:
        digest = first["weights"]["sha256"]
        raise UserError(f"--weights: expected the file with sha256 {digest}, found none")
    network = values.get("network")
    if "network" not in typed and network not in zoo.NETWORKS:
        values["network"] = None if "weights" in typed else INPUTS["network"].default
    return values


def _need_sets(certificate, values):
    data = certificate.of_kind(START)[-1]["data"]
    has_own = values.get("validation_fraction") or values.get("fold")
    # The data of a Python program may contain validation images; those of the command would say so.
    has_own = has_own or not certificate.of_kind(START)[0]["inputs"]
    needs = {"data": True, "validation_data": data["validation"] is not None and not has_own}
    for name, is_needed in needs.items():
        if is_needed and name not in values:
            purpose = {"data": "train", "validation_data": "validation"}[name]
            count = data[purpose]["images"]
            raise UserError(
                f"{flag(name)}: expected the images of the run ({purpose}: {count}), whose place a "
                "certificate does not name"
            )
