"""Audit the files of a run, and forge its certificate, of which the chain is bound anew."""

import shutil
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import certificate_files
from certified_runs import audit, chain

SIGNER = "alice@example.org"
ZEROS = "0" * 64
CERTIFICATE = "cause: the certificate: its states do not follow from this data and these options"


def new_key(path):
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(words, check=True)
    return path


def audit_files(folder, *words, signers=True):
    signed = ("--signers", folder / "signers") if signers else ()
    return audit(folder / "run", folder / "set.npz", *signed, *words)


def put(value, index, *keys):
    """Return a function that replaces a value in a link of a chain."""

    def change(predicate):
        place = predicate["chain"][index]
        for key in keys[:-1]:
            place = place[key]
        assert keys[-1] in place
        place[keys[-1]] = value

    return change


def state_at(folder, iteration):
    """Return the index of the state of an iteration."""
    links = chain(folder / "run")
    return next(
        i for i, x in enumerate(links) if x["kind"] == "state" and x["iteration"] == iteration
    )


def forge(folder, *changes):
    """Change the certificate, bind its chain anew, and remove what shows that it is a forgery."""
    path = folder / "run" / "certificate.json"
    for change in changes:
        certificate_files.forge(path, change)
    (folder / "run" / "certificate.json.sig").unlink(missing_ok=True)


def remove_checkpoints(folder):
    shutil.rmtree(folder / "run" / "checkpoints")
    for path in (folder / "run").glob("checkpoint*.h5"):
        path.unlink()


class Tampering(NamedTuple):
    """A change of the files or links of a run, and the subject and text of what an audit finds."""

    change: Callable
    subject: str
    text: str
