"""Load the checkpoints that a certificate covers, so that none of their values need be trusted."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidl.certificates import states
from mpidl.certificates.certificate import Certificate
from mpidl.certificates.chain import STATE, VALIDATION
from mpidl.errors import UserError
from mpidl.evaluation.validation import BEST
from mpidl.text import printable
from mpidl.training.files import checkpoint, model_file
from mpidl.training.progress import Position
from mpidl.training.rollback import PREFIX

if TYPE_CHECKING:
    pass


Arrays = dict[str, dict[str, np.ndarray]]
TABLES = ("learnables", "state", "optimizer")  # that each checkpoint has
NAME = re.compile(r"[0-9]{8,}\.h5")  # of a checkpoint that a run keeps


class Point(NamedTuple):
    """A state from which a replay may start: the initial one (no path) or a checkpoint."""

    iteration: int
    path: str | None = None


def paths_of(folder: str) -> list[str]:
    """Return the paths of the checkpoints in the folder of a run, and in its checkpoints/."""
    paths = []
    for place in (os.path.join(folder, checkpoint.KEEP_FOLDER), folder):
        names = sorted(os.listdir(place)) if os.path.isdir(place) else []
        paths += [os.path.join(place, name) for name in names if NAME.fullmatch(name)]
    paths += [os.path.join(folder, name) for name in (checkpoint.CURRENT, checkpoint.PREVIOUS)]
    return [path for path in paths if os.path.lexists(path)]


class Checkpoint(NamedTuple):
    """The contents of a checkpoint whose state the certificate has.

    Attributes
    ----------
    arrays : dict
        The arrays by table, all of which have the digests of the state.
    covered : dict
        The facts that follow from the certificate.
    facts : dict
        The facts of the file, which nothing covers.
    """

    arrays: Arrays
    covered: dict[str, Any]
    facts: dict[str, Any]


def load_covered(path: str, certificate: Certificate) -> Checkpoint | None:
    """Load a checkpoint, or return None if the certificate has no state of its iteration.

    A state to which the run may roll back must be one of the certificate too.

    Raises
    ------
    UserError
        If the file is damaged, or if a table is not that of the certificate.
    """
    name = printable(path)
    try:
        arrays, attributes = model_file.read(path)
        facts = checkpoint.facts_of(attributes)
        saved = [(facts, {t: a for t, a in arrays.items() if not t.startswith(PREFIX)})]
        if len(saved[0][1]) < len(arrays):
            earlier = {t.removeprefix(PREFIX): a for t, a in arrays.items() if t.startswith(PREFIX)}
            saved.append((facts["rollback"], earlier))
        positions = [_position_of(facts["position"]) for facts, _ in saved]
        for _, tables in saved:
            if missing := [table for table in TABLES if table not in tables]:
                raise ValueError(f"it has no {', '.join(missing)}")
    except (model_file.Torn, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{name}: expected a checkpoint: {error}") from None
    links = {link["iteration"]: link for link in certificate.of_kind(STATE)}
    if not all(position.iteration in links for position in positions):
        return None
    if positions[0].rollbacks < links[positions[0].iteration]["rollbacks"]:
        return None  # the run rolled back to an earlier state, and reached the iteration again
    differing = differing_names(
        links[positions[0].iteration]["tables"], states.table_digests(arrays)
    )
    covered = []
    for (facts, tables), position in zip(saved, positions, strict=True):
        link = links[position.iteration]
        validations = _validations_before(certificate, position.iteration, facts)
        best = {t: states.table_digest(t, tables[t]) for t in BEST if t in tables}
        problems = differing_names(validations[-1]["best"] if validations else {}, best)
        # A rollback sets the number of rollbacks anew. A run may be stopped just after it.
        position = replace(position, rollbacks=link["rollbacks"])
        if covered:
            digests = {t: states.table_digest(t, tables[t]) for t in TABLES}
            problems += differing_names({t: link["tables"].get(t) for t in TABLES}, digests)
            problems = [PREFIX + table for table in problems]
        if states.progress_digest(position) != link["progress"]:
            problems.append("progress")
        differing += problems
        seconds, validation = {"seconds": 0.0}, _validation_facts(validations, facts)
        covered.append({"position": asdict(position) | seconds, "validation": validation})
    if differing:
        text = f"{', '.join(differing)} differ from the state of iteration"
        raise UserError(f"{name}: {text} {positions[0].iteration}")
    rollback = {"rollback": covered[1]} if len(covered) > 1 else {}
    return Checkpoint(arrays, covered[0] | rollback, saved[0][0])


def _position_of(values):
    """Return the position in the facts of a checkpoint; raise an error if it is damaged."""
    position = Position(**values)
    for name, value in asdict(position).items():
        is_missing = value is None and name in ("correct", "epoch_loss")
        if type(value) not in (int, float) and not is_missing:
            raise ValueError(f"the {name} of its position is not a number")
    return position


def differing_names(expected, computed):
    """Return the names whose digests differ between two dicts."""
    return [name for name in {**expected, **computed} if expected.get(name) != computed.get(name)]


def _validations_before(certificate, iteration, facts):
    """Return the links of the validations that a checkpoint has.

    A validation of its iteration may have come later: at the end of the run, or because a signal
    interrupted it.
    """
    links = [v for v in certificate.of_kind(VALIDATION) if v["iteration"] <= iteration]
    saved = facts.get("validation")
    is_known = isinstance(saved, dict) and saved.get("at") == iteration and not _is_owed(facts)
    is_last = bool(links) and links[-1]["iteration"] == iteration
    return links[:-1] if is_last and not is_known else links


def _is_owed(facts):
    """Return whether a resumed run first makes the validation of the checkpoint's iteration."""
    saved = facts.get("validation")
    return isinstance(saved, dict) and saved.get("owed") is True


def _validation_facts(links, facts):
    """Return the state of the validations at a checkpoint, from the links of the certificate."""
    state: dict[str, Any] = {"loss": float("inf"), "accuracy": None, "iteration": 0}
    state |= {"waited": 0, "owed": _is_owed(facts)}
    for link in links:
        if link["loss"] is not None and link["loss"] < state["loss"]:
            state |= {name: link[name] for name in ("loss", "accuracy", "iteration")}
            state["waited"] = 0
        else:
            state["waited"] += 1
    if links:
        last = links[-1]
        loss = float("nan") if last["loss"] is None else last["loss"]
        state |= {"last": [last["accuracy"], loss, 0], "at": last["iteration"]}
    return state
