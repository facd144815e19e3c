"""Test that an audit finds what a forger writes into a certificate and its chain."""

import copy
from typing import NamedTuple

import certificate_files
import certified_runs
import pytest
from audited_files import CERTIFICATE, ZEROS, Tampering, audit_files, forge, put, remove_checkpoints
from certified_runs import chain

from mpidl.errors import UserError

pytestmark = pytest.mark.usefixtures("machine")


class Forgery(NamedTuple):
    """A value to put into a link, and the subject and the text of what an audit finds.

    `place` is the index of the link, or its kind and iteration.
    """

    place: int | tuple[str, int]
    keys: tuple
    value: object
    subject: str
    text: str


FORGERIES = {
    "an option": Forgery(
        place=0,
        keys=("options", "learning_rate"),
        value="0.02",
        subject="iterations 0-15",
        text=CERTIFICATE,
    ),
    "an option of images": Forgery(
        place=0, keys=("options", "mixup"), value="0.3", subject="iterations 0-15", text=CERTIFICATE
    ),
    "an option of the average": Forgery(
        place=0,
        keys=("options", "average_decay"),
        value="0.8",
        subject="iterations 0-15",
        text="optim",
    ),
    "the seed": Forgery(
        place=0,
        keys=("options", "seed"),
        value="1",
        subject="initial weights",
        text="not those of ",
    ),
    "a limit of iterations": Forgery(
        place=0,
        keys=("options", "max_iterations"),
        value="9",
        subject="iterations 0-15",
        text="from iteration 9 on: the replay ends here, the run after iteration 15 or later",
    ),
    "the number of epochs": Forgery(
        place=0,
        keys=("options", "epochs"),
        value="4",
        subject="iterations 0-15",
        text="from iteration 16 on: the options train on, but the run has ended",
    ),
    "an attribute of a layer": Forgery(
        place=0,
        keys=("network", "layers", 1, "epsilon"),
        value=1e-3,
        subject="iterations 0-15",
        text=CERTIFICATE,
    ),
    "a layer": Forgery(
        place=0,
        keys=("network", "layers", 0, "filters"),
        value=5,
        subject="network",
        text="filters is 4, was 5",
    ),
    "the initial state": Forgery(
        place=("state", 0),
        keys=("tables", "state"),
        value=ZEROS,
        subject="initial weights",
        text="state: ",
    ),
    "the statistics of the images": Forgery(
        place=("state", 0),
        keys=("tables", "normalization"),
        value=ZEROS,
        subject="iterations 0-15",
        text="from iteration 0 on: normalization differ",
    ),
    "a digest": Forgery(
        place=("state", 6),
        keys=("tables", "learnables"),
        value=ZEROS,
        subject="iterations 0-15",
        text=f"from iteration 6 on: learnables differ; {CERTIFICATE}",
    ),
    "a loss": Forgery(
        place=("state", 10),
        keys=("losses",),
        value=[0.5, 0.5],
        subject="iterations 0-15",
        text="9 on: the loss is",
    ),
    "the progress": Forgery(
        place=("state", 10),
        keys=("progress",),
        value=ZEROS,
        subject="iterations 0-15",
        text="progress differ",
    ),
    "a rollback": Forgery(
        place=("state", 10),
        keys=("rollbacks",),
        value=1,
        subject="iterations 0-15",
        text="from iteration 10 on: the run has rolled back 1 times, the replay has not",
    ),
    "a validation": Forgery(
        place=("validation", 8),
        keys=("loss",),
        value=0.25,
        subject="iterations 0-15",
        text="from iteration 8 on: v",
    ),
    "the weights": Forgery(
        place=("end", 15),
        keys=("weights",),
        value=ZEROS,
        subject="iterations 0-15",
        text="weights: ",
    ),
    "the returned iteration": Forgery(
        place=("end", 15),
        keys=("returned_iteration",),
        value=14,
        subject="iterations 0-15",
        text="returned iteration: 15, was 14",
    ),
    "the accuracy of the test": Forgery(
        place=("end", 15),
        keys=("test", "accuracy"),
        value=0.25,
        subject="test",
        text="accuracy is ",
    ),
    "the numerics": Forgery(
        place=0,
        keys=("software", "numerics"),
        value=99,
        subject="software",
        text="install mpidl 0.1.0, or another with numerics 99",
    ),
    "the number of images": Forgery(
        place=0,
        keys=("data", "train", "images"),
        value=67,
        subject="data",
        text="images is 66, was 67",
    ),
    "the root of the images": Forgery(
        place=0,
        keys=("data", "train", "root"),
        value=ZEROS,
        subject="data",
        text="the digests differ",
    ),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_certificate_differs(files, kind):
    """Without a signature and checkpoints, only replays and other files contradict the chain."""
    place, keys, value, subject, text = FORGERIES[kind]
    index = place
    if place != 0:
        links = chain(files / "run")
        pairs = [(link["kind"], link["iteration"]) for link in links]
        index = pairs.index(place)
    remove_checkpoints(files)
    forge(files, put(value, index, *keys))
    # The code of a run may set the initial weights, so the auditor says where they come from.
    is_network = subject in ("network", "initial weights")
    words = ("--network", certified_runs.NETWORK) if is_network else ()
    result = audit_files(files, *words, signers=False)
    assert result.code == 1 and subject in result.differing, result.lines
    verdict, line = next(x for x in result.rows(subject) if x[0] == "DIFFERENT")
    assert text in line, line
    assert result.rows("certificate")[0][0] == "equal"


def another_validation(links):
    """Add a validation with a better result before the true one."""
    i = index_of(links, "validation", 12)
    links.insert(i, {**links[i], "loss": 0.001, "accuracy": 1.0})


def no_iterations(links):
    end = {**links[-1], "iteration": 0, "returned_iteration": 0}
    links[:] = [links[0], links[index_of(links, "state", 0)], end]


def another_best(links):
    """Change the best network at a validation that is not better than the one before."""
    for link in links:
        if link["kind"] == "validation":
            link["best"] = {"best_learnables": ZEROS}
    i = index_of(links, "validation", 12)
    links[i] |= {"loss": 9.0, "best": {"best_learnables": "1" * 64}}


def other_entry(name, change):
    """Return a function that lets the first start have another entry than a later one."""

    def forge_links(links):
        later = {"kind": "start", "iteration": 8, "ranks": 1, name: copy.deepcopy(links[0][name])}
        links.insert(index_of(links, "state", 8) + 1, later)
        links[0][name] = change(links[0][name])

    return forge_links


def another_loss(links):
    links[0]["network"]["loss"] = {"name": "focal"}


def index_of(links, kind, iteration):
    return [(link["kind"], link["iteration"]) for link in links].index((kind, iteration))


CHAINS = {
    "a better validation": Tampering(
        change=another_validation, subject="certificate", text="expected one validation per"
    ),
    "no iterations": Tampering(
        change=no_iterations, subject="certificate", text="expected at least one iteration"
    ),
    "another best network": Tampering(
        change=another_best, subject="certificate", text="expected the best network of the lowest"
    ),
    "other images in the first start": Tampering(
        change=other_entry(
            "data", lambda data: {**data, "train": {**data["train"], "root": ZEROS}}
        ),
        subject="data",
        text="the start at iteration 8 has another entry data than the first",
    ),
    "another sweep in a later start": Tampering(
        change=other_entry("sweep", lambda sweep: {"file": ZEROS, "trial": 1, "trials": 1}),
        subject="options",
        text="the start at iteration 8 has another entry sweep than the first",
    ),
    "the loss of the network": Tampering(
        change=another_loss, subject="iterations 0-15", text="loss of the network is"
    ),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_that_no_run_writes(files, kind):
    change, subject, text = CHAINS[kind]
    remove_checkpoints(files)
    forge(files, lambda predicate: change(predicate["chain"]))
    result = audit_files(files, signers=False)
    assert result.code == 1 and subject in result.differing, result.lines
    assert any(v == "DIFFERENT" and text in line for v, line in result.rows(subject)), result.lines


@pytest.mark.parametrize("names", [("weights", "weights"), ("weights", "other.h5")])
def test_subjects_that_no_audit_compares(files, names):
    def change(statement):
        digest = statement["subject"][0]["digest"]
        statement["subject"] = [{"name": name, "digest": digest} for name in names]

    certificate_files.changed(files / "run" / "certificate.json", change)
    with pytest.raises(UserError, match="subject"):
        audit_files(files, signers=False)
