"""The checks of an audit that train nothing: the certificate and the files beside it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidl import numerics
from mpidl.certificates import certificate as certificates
from mpidl.certificates import (
    differences,
    images,
    recording,
    replay,
    settings,
    signing,
    sources,
    states,
)
from mpidl.certificates.certificate import FILE, MANIFEST, MODEL, WEIGHTS, Certificate
from mpidl.certificates.chain import START, STATE
from mpidl.certificates.covered import Point, load_covered
from mpidl.errors import UserError
from mpidl.files import open_for_reading, sha256_of_file, unreadable
from mpidl.nn import zoo
from mpidl.options.declaration import flag
from mpidl.text import name_list, printable
from mpidl.training.files import model_file
from mpidl.training.options.training_options import OPTIONS

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.nn import Network

EQUAL, DIFFERENT = "equal", "DIFFERENT"
OTHER = "other"  # other than here, which proves nothing
UNCHECKED = "unchecked"
SUBJECT_COLUMNS = 20
# Builds of the kernels whose weights have the same bytes. On x86-64, those of `generic` differ.
SAME_BYTES = "vector instructions"


class Finding(NamedTuple):
    """The result of a check.

    Attributes
    ----------
    subject : str
        What has been checked, such as "data" or "iterations 0-50".
    verdict : {"equal", "DIFFERENT", "other", "unchecked"}
        Whether it agrees with the certificate. "other" is a fact that explains a difference but is
        none. "unchecked" proves nothing, because something is missing.
    text : str
        The details.
    """

    subject: str
    verdict: str
    text: str

    def __str__(self) -> str:
        return f"{self.subject:<{SUBJECT_COLUMNS}}  {self.verdict:<9}  {printable(self.text)}"


def short(digest: str) -> str:
    """Return the first digits of a digest."""
    return f"{digest[:12]}..."


def check_chain(certificate: Certificate) -> Finding:
    """Check the digests and the order of the links, and the subject `weights`."""
    problem = certificate.broken or certificate.disorder
    weights, recorded = certificate.subjects.get(WEIGHTS), certificate.end.get("weights")
    if problem is None and weights != recorded:
        problem = f"its subject weights is {weights}, its chain ends with {recorded}"
    if problem is not None:
        return Finding("certificate", DIFFERENT, problem)
    text = f"{len(certificate.links)} links, head {short(certificate.head)}"
    return Finding("certificate", EQUAL, text)


def check_signature(path: str, signers: str | None) -> Finding:
    """Check the signature beside a certificate, by the file of those who may sign."""
    signature, subject = path + signing.ENDING, "signature"
    if signers is not None:
        try:
            open_for_reading(signers).close()
        except OSError as error:
            raise unreadable(signers, error) from None
    if not os.path.lexists(signature):
        text = "the certificate is not signed"
        verdict = UNCHECKED if signers is None else DIFFERENT
        return Finding(subject, verdict, text + ("" if signers is None else f": no {signature}"))
    if signers is None and shutil.which("ssh-keygen") is None:
        return Finding(subject, UNCHECKED, "expected the program ssh-keygen, found none")
    try:
        signer = signing.verify(path, signature, signers)
    except UserError as error:
        if shutil.which("ssh-keygen") is None:
            raise
        return Finding(subject, DIFFERENT, str(error))
    key = f"{signer.key_type} {signer.fingerprint}"
    if signer.principal is None:
        return Finding(subject, UNCHECKED, f"{key}; whose key is it? (--signers)")
    return Finding(subject, EQUAL, f"{signer.principal} ({key})")


def check_software(certificate: Certificate) -> Finding:
    """Compare the version of the arithmetic, and the sources, with those of this mpidl."""
    current, subject = sources.software(), "software"
    names = {}
    for start in certificate.of_kind(START):
        software = start["software"]
        name = f"mpidl {software['mpidl']}, numerics {software['numerics']}"
        if software["numerics"] != numerics.VERSION:
            text = (
                f"{name}; this is mpidl {current['mpidl']}, numerics {numerics.VERSION}: install "
            )
            text += f"mpidl {software['mpidl']}, or another with numerics {software['numerics']}"
            return Finding(subject, DIFFERENT, text)
        if software["sources"] == current["sources"] and software["mpidl"] != current["mpidl"]:
            text = f"{name}; its sources are those of mpidl {current['mpidl']}"
            return Finding(subject, DIFFERENT, text)
        names[software["sources"]] = name
    text = ", ".join(dict.fromkeys(names.values()))
    if set(names) == {current["sources"]}:
        return Finding(subject, EQUAL, text)
    digests = ", ".join(short(digest) for digest in names if digest != current["sources"])
    return Finding(
        subject,
        OTHER,
        f"{text}; its sources are {digests}, here they are {short(current['sources'])}",
    )


def arithmetic_class(arithmetic: Mapping[str, Any]) -> str:
    """Return what the bytes of weights depend on: a GPU, NumPy, or the kind of the kernels."""
    device, kernels = arithmetic["device"], arithmetic["kernels"]
    if device != "cpu":
        return device
    if kernels == "numpy" or (kernels == "generic" and platform.machine() in ("x86_64", "AMD64")):
        return kernels
    return SAME_BYTES


def check_arithmetic(certificate: Certificate, current: Mapping[str, Any]) -> Finding:
    """Compare what the run computed with, and what this machine computes with."""
    advice: dict[str, str] = {}
    names = {}
    for start in certificate.of_kind(START):
        arithmetic = start["arithmetic"]
        name = _name_of(arithmetic)
        names[name] = None
        if arithmetic_class(arithmetic) != arithmetic_class(current):
            advice[name] = _advice(arithmetic)
    if advice:
        text = "; ".join(f"the run used {name} ({words})" for name, words in advice.items())
        return Finding("arithmetic", OTHER, f"{text}; here it is {_name_of(current)}")
    return Finding("arithmetic", EQUAL, ", ".join(names))


def _name_of(arithmetic):
    if arithmetic["device"] != "cpu":
        return str(arithmetic["device"])
    return f"cpu, kernels {arithmetic['kernels']}"


def _advice(arithmetic):
    if arithmetic["device"] != "cpu":
        return "replay it with --device gpu on a GPU of this type"
    if arithmetic_class(arithmetic) == SAME_BYTES:
        return "replay it with --device cpu, without MPIDL_CPU, on AVX2, AVX-512 or AArch64"
    return f"replay it with --device cpu and MPIDL_CPU={arithmetic['kernels']}"


def check_model(certificate: Certificate, folder: str) -> Finding:
    """Compare the file of the trained network, whether the certificate names it or not."""
    path, expected = os.path.join(folder, MODEL), certificate.subjects.get(MODEL)
    if not os.path.lexists(path):
        text = "the certificate names no model.h5" if expected is None else f"there is no {path}"
        return Finding("model", UNCHECKED, text)
    name, weights, sha256 = printable(path), certificate.end["weights"], sha256_of_file(path)
    try:
        tables, attributes = model_file.read(path)
        learnables, state = (tables.get(table, {}) for table in ("learnables", "state"))
        digest = model_file.sha256_of(learnables, state)
        problem = _changed_model(certificate, tables, model_file.described(attributes))
    except (model_file.Torn, KeyError, TypeError, ValueError) as error:
        return Finding("model", DIFFERENT, f"{name}: {error}")
    if digest != weights:
        problem = f"weights_sha256 is {digest}, in the certificate it is {weights}"
    elif problem is None and expected not in (None, sha256):
        problem = "the weights are those of the certificate, but the file is another one"
    if problem is not None:
        return Finding("model", DIFFERENT, f"{name}: {problem}")
    return Finding("model", EQUAL, f"{name}, sha256 {short(sha256)}")


def _changed_model(certificate, tables, description):
    """Return what a file of a network says of the network that is not so, or None."""
    start = certificate.of_kind(START)[-1]
    recorded, names = start["network"], start["data"]["train"]["classes"]
    saved = recording.plain(description)
    problem = _changed_layers(certificate, saved["network"])
    for key in ("input_shape", "loss"):
        if saved.get(key) != recorded[key]:
            problem = problem or f"{key} is {saved.get(key)}, was {recorded[key]}"
    # A network may have no classes, such as one of numbers, or names of more outputs.
    if (classes := saved["classes"]) and classes[: max(len(names), 1)] != names:
        problem = problem or f"classes is {classes}, was {names}"
    # The arrays of the normalization are in all states.
    name, normalization = "normalization", tables.get("normalization", {})
    digest = states.table_digest(name, normalization) if normalization else None
    if digest != certificate.of_kind(STATE)[-1]["tables"].get(name):
        problem = problem or "the normalization is not that of the last state"
    return problem


def check_options(certificate: Certificate, options: Mapping[str, str] | None) -> Finding:
    """Check that options that a resumed run keeps are the same in all starts.

    `options` are the texts of the options that a Python program passes, or None.
    """
    starts = certificate.of_kind(START)
    problems = []
    for before, now in zip(starts, starts[1:], strict=False):
        for name, text in now["options"].items():
            old = before["options"].get(name, text)
            is_fixed = name not in OPTIONS or OPTIONS[name].metadata["resume"] == "fixed"
            if old != text and is_fixed:
                place = f"the start at iteration {now['iteration']}"
                problems.append(f"{flag(name)} is {text} in {place}, was {old}")
    for name, text in (options or {}).items():
        # The options may be those of any job, for example with fewer epochs than the last one.
        recorded = [start["options"].get(name, text) for start in starts]
        if name not in (*replay.NEUTRAL, "certify_every") and text not in recorded:
            problems.append(f"{flag(name)} is {text}, was {recorded[-1]}")
    if problems:
        return Finding("options", DIFFERENT, name_list(problems))
    text = f"{len(starts[0]['options'])} options"
    if len(starts) > 1:
        text += f" of {len(starts)} starts"
    return Finding("options", EQUAL, text)


def check_checkpoints(
    certificate: Certificate, paths: Iterable[str]
) -> tuple[list[Finding], list[Point]]:
    """Compare checkpoints with the states of a certificate; return the points to start from."""
    findings, points, between = [], {}, 0
    for path in paths:
        try:
            loaded = load_covered(path, certificate)
        except UserError as error:
            findings.append(Finding("checkpoints", DIFFERENT, str(error)))
            continue
        if loaded is None:
            between += 1
            continue
        iteration, facts = loaded.covered["position"]["iteration"], loaded.facts
        problems = {
            "options": _changed_options(certificate, iteration, facts.get("options")),
            "network": _changed_layers(certificate, recording.plain(facts["network"])),
        }
        findings += [
            Finding(subject, DIFFERENT, f"{printable(path)}: {text}")
            for subject, text in problems.items()
            if text is not None
        ]
        points[iteration] = Point(iteration, path)
    rest = f"; {between} between states of the certificate" if between else ""
    if points:
        text = f"{len(points)}, of iterations {_shortened(sorted(points))}{rest}"
        findings.append(Finding("checkpoints", EQUAL, text))
    elif not findings:
        text = f"there are none to start replays from{rest}"
        findings.append(Finding("checkpoints", UNCHECKED, text))
    return findings, [points[iteration] for iteration in sorted(points)]


def _shortened(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers if len(numbers) < 9 else [*numbers[:4], "...", numbers[-1]]))


def _changed_options(certificate, iteration, options):
    """Return how the options of a checkpoint differ from those of its start, or None."""
    if not isinstance(options, dict):
        return "it has no options"
    starts = certificate.of_kind(START)
    before = [start for start in starts if start["iteration"] < iteration]
    # A run that was resumed at this iteration may not have written the checkpoint again.
    starts = [s for s in starts if s["iteration"] == iteration] + before[-1:]
    problems = [
        [
            f"{flag(name)} is {settings.text_of(options[name])}, in the certificate {text}"
            for name, text in start["options"].items()
            if name in options and settings.text_of(options[name]) != text
        ]
        for start in starts
    ]
    return None if [] in problems else name_list(problems[-1])


class Manifest(NamedTuple):
    """The digests of the images of a run, or why they cannot be used.

    Attributes
    ----------
    digests : dict
        {name of a set: digests (n, 32)}; {} if the file is missing or has been changed.
    finding : Finding or None
        The problem with the file.
    """

    digests: dict[str, np.ndarray]
    finding: Finding | None


def sets_of(certificate: Certificate) -> dict[str, dict[str, Any]]:
    """Return {name of a set: its description in the certificate}, in the manifest's order."""
    data, test = certificate.of_kind(START)[-1]["data"], certificate.end["test"]
    sets = {"train": data["train"], "validation": data["validation"]}
    sets["test"] = test and test["data"]
    return {name: described for name, described in sets.items() if described is not None}


def read_manifest(certificate: Certificate, folder: str) -> Manifest:
    """Read the manifest beside a certificate, and compare it with the chain."""
    path, sets = os.path.join(folder, MANIFEST), sets_of(certificate)
    if not os.path.lexists(path):
        text = f"there is no {printable(path)}, which would name images that differ"
        return Manifest({}, Finding("manifest", UNCHECKED, text))
    try:
        digest = sha256_of_file(path)
        if digest != certificate.manifest:
            raise UserError(
                f"{printable(path)}: sha256 is {short(digest)}, in the certificate it is "
                f"{short(certificate.manifest)}"
            )
        counts = {name: described["images"] for name, described in sets.items()}
        digests = images.read_manifest(path, counts)
        for name, described in sets.items():
            if images.root(digests[name]) != described["root"]:
                raise UserError(f"{printable(path)}: the root of {name} is not that of the chain")
    except UserError as error:
        return Manifest({}, Finding("manifest", DIFFERENT, str(error)))
    return Manifest(digests, None)


def check_images(
    name: str,
    described: Mapping[str, Any],
    store: Datastore,
    digests: np.ndarray,
    expected: np.ndarray | None,
    salt: bytes | None,
) -> Finding:
    """Compare the images of a set with the certificate, and name those that differ.

    `expected` are the digests of the manifest, or None if it cannot be used.
    """
    current = images.describe(store, digests)
    problems = []
    if current["root"] != described["root"]:
        problems = ["the digests differ, and there is no manifest to tell which"]
        if expected is not None:
            problems = differences.differences(expected, digests, store, salt, name)
    keys = [key for key in current if key != "root" and current[key] != described[key]]
    if _are_unnamed(current["classes"]) or _are_unnamed(described["classes"]):
        keys = [key for key in keys if key != "classes"]
    problems = [f"{key} is {current[key]}, was {described[key]}" for key in keys] + problems
    if problems:
        return Finding("data", DIFFERENT, f"{name}: {name_list(problems)}")
    skipped = int((~digests.any(axis=1)).sum())
    text = f"{len(store)} images" + (f", {skipped} of them unreadable" if skipped else "")
    return Finding("data", EQUAL, f"{name}: {text}, root {short(current['root'])}")


def _are_unnamed(classes):
    """Return whether classes are named by their indices, because the data have no names."""
    return classes == [str(i) for i in range(len(classes))]


def _changed_layers(certificate: Certificate, layers: Any) -> str | None:
    """Return how layers differ from those of the certificate, or None."""
    expected = certificate.of_kind(START)[0]["network"]["layers"]
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        return "it has no layers"
    for old, new in zip(expected, layers, strict=False):
        if old != new:
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            values = [f"{key} is {new.get(key)}, was {old.get(key)}" for key in keys]
            return f"layer {old.get('name')}: {name_list(values)}"
    if len(expected) != len(layers):
        return f"it has {len(layers)} layers, in the certificate {len(expected)}"
    return None


def check_network(certificate: Certificate, net: Network) -> Finding:
    """Compare the layers of the network to train with those of the certificate."""
    expected, shape = certificate.of_kind(START)[0]["network"], list(net.input_shape)
    layers = recording.plain(net.spec())
    text = _changed_layers(certificate, layers)
    if shape != expected["input_shape"]:
        text = f"input shape is {shape}, was {expected['input_shape']}"
    if text is not None:
        return Finding("network", DIFFERENT, text)
    learnables = sum(array.size for array in net.parameters.values())
    return Finding("network", EQUAL, f"{len(layers)} layers, {learnables:,} learnables")


def check_weights(certificate: Certificate, path: str) -> Finding:
    """Compare the file of weights that the run began with, and the certificate beside it."""
    recorded, digest = certificate.of_kind(START)[0]["weights"], sha256_of_file(path)
    name = printable(path)
    if digest != recorded["sha256"]:
        text = f"{name}: sha256 is {digest}, was {recorded['sha256']}"
        return Finding("initial weights", DIFFERENT, text)
    expected, text = recorded["certificate"], f"{name}, sha256 {short(digest)}"
    if expected is None:
        return Finding("initial weights", EQUAL, f"{text}; the file had no certificate")
    other = os.path.join(os.path.dirname(path), FILE)
    if not os.path.lexists(other) or sha256_of_file(other) != expected:
        text += f"; its certificate, with sha256 {short(expected)}, is not beside it"
        return Finding("initial weights", EQUAL, text)
    if digest not in certificates.read(other).subjects.values():
        text = f"{name}: {printable(other)} is the certificate of another file"
        return Finding("initial weights", DIFFERENT, text)
    return Finding("initial weights", EQUAL, f"{text}; its certificate is {printable(other)}")


def check_starts(certificate: Certificate) -> list[Finding]:
    """Check that all starts name the same images, network, optimizer, weights and sweep."""
    subjects = {"data": "data", "network": "network", "optimizer": "network"}
    subjects |= {"weights": "initial weights", "sweep": "options"}
    first, *later = certificate.of_kind(START)
    return [
        Finding(
            subjects[key],
            DIFFERENT,
            f"the start at iteration {start['iteration']} has another entry {key} than the first",
        )
        for start in later
        for key in subjects
        if start[key] != first[key]
    ]


def check_hooks(certificate: Certificate) -> list[Finding]:
    """Name the hooks of the run that are not part of mpidl, and might change the training."""
    starts = certificate.of_kind(START)
    names = list(dict.fromkeys(name for start in starts for name in start["hooks"]))
    return [Finding("hooks", OTHER, f"the run had {name_list(names)}")] if names else []


class Source(NamedTuple):
    """What gave the initial weights.

    Attributes
    ----------
    text : str
        Its name, such as "the seed 0".
    is_certain : bool
        Whether the certificate or the auditor says so. The Python code of a run may set weights.
    """

    text: str
    is_certain: bool = True


def seed_of(certificate: Certificate) -> Source:
    """Return the seed of a run as the source of its initial weights."""
    network = certificate.of_kind(START)[0]["inputs"].get("network")
    return Source(f"the seed {seed(certificate)}", network in zoo.NETWORKS)


def seed(certificate: Certificate) -> int:
    """Return the seed of a run."""
    text = certificate.of_kind(START)[0]["options"].get("seed", "0")
    return int(settings.value_of("seed", text))


def check_initial_weights(certificate: Certificate, net: Network, source: Source) -> Finding:
    """Compare the weights of a new network with the first state."""
    subject, first = "initial weights", certificate.of_kind(STATE)[0]["tables"]
    if net.unwhitened:
        text = "computed from the images: see the state of iteration 0"
        return Finding(subject, UNCHECKED if source.is_certain else OTHER, text)
    tables = {"learnables": net.parameters, "state": net.state}
    for table, arrays in tables.items():
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        if states.table_digest(table, arrays) != first.get(table):
            verdict, text = DIFFERENT, f"{table}: they are not those of {source.text}"
            if not source.is_certain:
                verdict, text = OTHER, f"{text}; the Python code of the run may have set them"
            return Finding(subject, verdict, text)
    return Finding(subject, EQUAL, f"from {source.text}")
