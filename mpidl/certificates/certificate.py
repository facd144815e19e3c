"""Read and write certificates: in-toto statements with the chain of a training run."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpidl.certificates import chain
from mpidl.certificates.chain import Link
from mpidl.errors import UserError
from mpidl.files import open_for_reading, unreadable, write_whole
from mpidl.text import pip_install, printable

FILE = "certificate.json"
MANIFEST = "certificate-images.txt"  # beside the certificate, bound by its SHA-256
SCHEMA = os.path.join(os.path.dirname(__file__), "certificate.schema.json")
STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "urn:mpidl:training:1"
WEIGHTS, MODEL = "weights", "model.h5"  # subjects
MAX_BYTES = 256 << 20
# The entries of the first start; later starts have those that have changed.
START_ENTRIES = (
    *("software", "arithmetic", "options", "inputs", "network", "optimizer", "weights", "data"),
    *("hooks", "sweep"),
)


class Certificate(NamedTuple):
    """A certificate whose form has been checked.

    Attributes
    ----------
    path : str
        The file.
    sha256 : str
        SHA-256 of the file.
    subjects : dict
        {name of a subject: SHA-256}.
    links : list of dict
        The chain.
    head : str
        The digest that the last link must have.
    manifest : str
        SHA-256 of the manifest of the images.
    salt : str or None
        SHA-256 of the salt, or None if the digests of the images have no salt.
    broken : str or None
        The link whose digest the next link or the head contradicts, or None.
    disorder : str or None
        Where the links do not have the order of a run, or None.
    """

    path: str
    sha256: str
    subjects: dict[str, str]
    links: list[Link]
    head: str
    manifest: str
    salt: str | None
    broken: str | None
    disorder: str | None

    def of_kind(self, kind: str) -> list[Link]:
        """Return the links of a kind. Starts have all entries."""
        if kind == chain.START:
            return chain.starts(self.links)
        return [link for link in self.links if link["kind"] == kind]

    @property
    def end(self) -> Link:
        """The last link."""
        return self.links[-1]


def write(
    path: str | os.PathLike[str],
    links: Sequence[Mapping[str, Any]],
    subjects: Mapping[str, str],
    manifest: str,
    salt: str | None,
) -> None:
    """Write a certificate.

    Parameters
    ----------
    path : path
        The file.
    links : sequence of dict
        The chain.
    subjects : mapping
        {name: SHA-256}, see `Certificate`.
    manifest, salt : str or None
        SHA-256 of the manifest, and of the salt if there is one.
    """
    predicate = {
        "chain": list(links),
        "head": chain.digest(links[-1]),
        "manifest": {"name": MANIFEST, "sha256": manifest},
        "salt": salt,
    }
    subject = [{"name": name, "digest": {"sha256": value}} for name, value in subjects.items()]
    statement = {"_type": STATEMENT, "subject": subject, "predicateType": PREDICATE}
    text = json.dumps({**statement, "predicate": predicate}, indent=1, allow_nan=False)
    write_whole(path, f"{text}\n".encode())


def locate(run: str | os.PathLike[str]) -> str:
    """Return the path of the certificate of a run, given its folder or the certificate."""
    path = os.fspath(run)
    return os.path.join(path, FILE) if os.path.isdir(path) else path


def read(path: str | os.PathLike[str]) -> Certificate:
    """Read a certificate, and check its form.

    Parameters
    ----------
    path : path
        The file, or the folder of a run.

    Raises
    ------
    UserError
        If the file is missing, damaged, too large or not a certificate.
    """
    path = locate(path)
    path_text = printable(path)
    validators = _library(path_text)
    try:
        with open_for_reading(path) as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        hint = "; train --certify writes one, a sweep one per trial"
        is_folder = os.path.basename(path) == FILE and os.path.isdir(os.path.dirname(path) or ".")
        raise UserError(f"{unreadable(path, error)}{hint if is_folder else ''}") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if len(content) > MAX_BYTES:
        raise UserError(f"{path_text}: expected a certificate of at most {MAX_BYTES >> 20} MB")
    try:
        statement = json.loads(
            content.decode(),
            object_pairs_hook=_unique,
            parse_float=_finite,
            parse_constant=_finite,
        )
        problem = _problem(statement, validators)
        if problem is None:
            return _certificate(path, content, statement)
    except UnicodeDecodeError:
        problem = "it is not a text"
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    raise UserError(f"{path_text}: not a certificate: {problem}")


def _library(path_text):
    try:
        return importlib.import_module("jsonschema.validators")
    except ImportError:
        raise UserError(
            f"{path_text}: expected the package jsonschema, which is not installed "
            f"({pip_install('audit')})"
        ) from None


def _unique(pairs):
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the entry {twice:.50} occurs twice")
    return entries


def _finite(text):
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"expected finite numbers, found {text:.50}")
    return value


def _problem(statement, validators):
    """Return how a statement differs from the schema, or None."""
    draft = validators.Draft202012Validator
    # JSON Schema counts 3.0 as an integer, but an index must be an int.
    checker = draft.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    with open(SCHEMA, encoding="utf-8") as file:
        schema = json.load(file)
    error = next(
        validators.extend(draft, type_checker=checker)(schema).iter_errors(statement), None
    )
    if error is None:
        return None
    place = "".join(
        f"[{key}]" if isinstance(key, int) else f".{key}" for key in error.absolute_path
    )
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    kind = kinds.get(type(error.instance), "a number")
    value = "null" if error.instance is None else kind
    if isinstance(error.instance, str | int | float):
        value = f"{error.instance!r:.100}"
    rule = {"anyOf": "a SHA-256 or null", "additionalProperties": "no other entries"}
    expected = rule.get(error.validator, f"{error.validator} {error.validator_value}")
    return f"{place.lstrip('.')[:100] or 'the file'}: expected {expected:.300}, found {value}"


def _certificate(path, content, statement):
    predicate, names = statement["predicate"], [item["name"] for item in statement["subject"]]
    if len({*names}) < len(names):
        raise ValueError("subject: expected each name once")
    links, head = predicate["chain"], predicate["head"]
    return Certificate(
        path=path,
        sha256=hashlib.sha256(content).hexdigest(),
        subjects={item["name"]: item["digest"]["sha256"] for item in statement["subject"]},
        links=links,
        head=head,
        manifest=predicate["manifest"]["sha256"],
        salt=predicate["salt"],
        broken=_broken(links, head),
        disorder=next(iter(_disorder(links)), None),
    )


def _broken(links, head):
    """Return which link the next link or the head contradicts, or None."""
    if links[0]["previous"] != chain.FIRST:
        return f"{_name(links, 0)} is not the first of a chain"
    index = chain.broken(links, head)
    if index is not None:
        following = "the head" if index == len(links) - 1 else f"link {index + 1}"
        return f"{_name(links, index)} is not the link that {following} confirms"
    return None


def _name(links, index):
    link = links[index]
    return f"link {index} ({link['kind']}, iteration {link['iteration']})"


def _disorder(links) -> Iterable[str]:
    missing = [name for name in START_ENTRIES if name not in links[0]]
    if links[0]["kind"] != chain.START or missing:
        text = f" without {', '.join(missing)}" if links[0]["kind"] == chain.START else ""
        yield f"link 0: expected a start with all entries, found {links[0]['kind']}{text}"
    iteration, last_state, last_validation = 0, None, None
    for index, link in enumerate(links):
        name, kind = _name(links, index), link["kind"]
        if link["iteration"] < iteration:
            yield f"{name}: expected an iteration of at least {iteration}"
        iteration = link["iteration"]
        if (kind == chain.END) != (index == len(links) - 1):
            yield f"{name}: expected one end, which is the last link"
        if kind == chain.STATE:
            count = iteration - (last_state or 0)
            if last_state is None and iteration or last_state == iteration:
                yield f"{name}: expected states from iteration 0 on, one per iteration"
            if len(link["losses"]) != count:
                yield f"{name}: expected {count} losses, found {len(link['losses'])}"
            last_state = iteration
        if kind == chain.VALIDATION:
            if last_validation == iteration or not iteration:
                yield f"{name}: expected one validation per iteration, after the first iteration"
            last_validation = iteration
    yield from _other_best(links)
    if not iteration:
        yield f"{_name(links, len(links) - 1)}: expected at least one iteration"
    if last_state != iteration:
        yield f"{_name(links, len(links) - 1)}: expected a state at this iteration"


def _other_best(links):
    """Yield the validations with another best network than before, without a lower loss."""
    lowest, best = math.inf, None
    for index, link in enumerate(links):
        if link["kind"] == chain.VALIDATION:
            loss = math.inf if link["loss"] is None else link["loss"]
            if loss >= lowest and link["best"] != best:
                yield f"{_name(links, index)}: expected the best network of the lowest loss so far"
            lowest, best = min(loss, lowest), link["best"]
