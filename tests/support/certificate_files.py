"""Write certificates by hand, as a run would, and forge them."""

import copy
import json

from mpidl.certificates import certificate, chain

DIGESTS = [f"{i:064x}" for i in range(10)]
IMAGES = {
    "images": 6,
    "image_shape": [1, 4, 3],
    "dtype": "uint8",
    "targets_shape": None,
    "classes": ["a", "b"],
    "root": DIGESTS[1],
}
START = {
    "kind": "certificate_start",
    "iteration": 0,
    "software": {"mpidl": "0.1.0", "numerics": 1, "sources": DIGESTS[2]},
    "arithmetic": {"device": "cpu", "kernels": "x86-64-v3", "kernel_sources": DIGESTS[3]},
    "ranks": 2,
    "options": {"batch_size": "4", "certify_every": "2"},
    "inputs": {"data": "digits"},
    "network": {"layers": [{"type": "Dense"}], "input_shape": [1, 4, 3], "loss": None},
    "optimizer": None,
    "weights": None,
    "data": {"train": IMAGES, "validation": None},
    "hooks": [],
    "sweep": {"file": DIGESTS[0], "trial": 2, "trials": 3},
}


def state(iteration, **entries):
    tables = {"learnables": DIGESTS[4 + iteration % 4]}
    numbers = {"epoch": 1, "iteration": iteration, "rollbacks": 0}
    kind = "certificate_state"
    return {"kind": kind, **numbers, "tables": tables, "progress": DIGESTS[5], **entries}


RECORDS = [
    START,
    state(0),
    {"kind": "iteration", "iteration": 1, "loss": 2.25},
    {"kind": "iteration", "iteration": 2, "loss": None},
    state(2),
    {
        "kind": "certificate_validation",
        "iteration": 2,
        "loss": 1.5,
        "accuracy": 0.5,
        "best": {"best_learnables": DIGESTS[6]},
    },
    {**START, "iteration": 2, "ranks": 3},
    {"kind": "iteration", "iteration": 3, "loss": 1.0},
    state(3),
]
END = {
    "iteration": 3,
    "stopped": None,
    "returned_iteration": 2,
    "weights": DIGESTS[7],
    "validation": {"loss": 1.5, "accuracy": 0.5},
    "test": {"loss": 2.0, "accuracy": None, "data": IMAGES},
}


def write(folder, records=RECORDS, end=END):
    """Write the certificate of records, and return its path."""
    path = folder / certificate.FILE
    links = chain.build(copy.deepcopy(records), copy.deepcopy(end))
    subjects = {"weights": links[-1]["weights"], "model.h5": DIGESTS[8]}
    certificate.write(path, links, subjects, DIGESTS[9], None)
    return path


def changed(path, change):
    """Change the statement of a certificate without mending its chain."""
    statement = json.loads(path.read_text())
    change(statement)
    path.write_text(json.dumps(statement))


def bind(links):
    """Bind links to each other anew, as a forger would, and return the head."""
    previous = chain.FIRST
    for link in links:
        link["previous"] = previous
        previous = chain.digest(link)
    return previous


def forge(path, change):
    """Change the predicate of a certificate, and mend its chain, subjects and head."""

    def change_statement(statement):
        predicate = statement["predicate"]
        change(predicate)
        predicate["head"] = bind(predicate["chain"])
        for subject in statement["subject"]:
            if subject["name"] == "weights":
                subject["digest"]["sha256"] = predicate["chain"][-1]["weights"]

    changed(path, change_statement)
