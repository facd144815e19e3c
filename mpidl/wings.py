"""The wings: features that neither a reader of the core nor a rank that trains needs.

A wing is one folder. The other rooms import it only inside the functions that need it, so they work
without it. To remove a wing, delete its folder, its tests and its line in `WINGS`.
"""

from importlib.machinery import ModuleSpec
from typing import NamedTuple

from mpidl.errors import UserError


class Wing(NamedTuple):
    """What a wing does, and the command that its module `command` defines, if any."""

    purpose: str
    command: str = ""
    summary: str = ""  # of the command


WINGS = {  # {folder in mpidl/, with dots: wing}
    "interchange": Wing(
        purpose="weights and networks as safetensors and ONNX",
        command="convert",
        summary="Convert networks between file formats",
    ),
    "sweeps": Wing(
        purpose="many models at once, on groups of ranks",
        command="sweep",
        summary="Train many models on groups of ranks",
    ),
    "jobs": Wing(
        purpose="ranks started from a notebook, and jobs that start again after they have died",
        command="launch",
        summary="Start a training again if it dies",
    ),
    "performance": Wing(
        purpose="scaling studies and predictions of the speed",
        command="scaling",
        summary="Measure and predict the speed on many numbers of ranks",
    ),
    "report.live": Wing(
        purpose="the live page of runs",
        command="monitor",
        summary="Show runs in a browser, and stop them",
    ),
    "report.page": Wing(
        purpose="pages about finished runs",
        command="report",
        summary="Show the results of runs, or write a page about them",
    ),
    "published": Wing(
        purpose="networks with published weights",
        command="fetch",
        summary="Download published weights of networks, such as ResNet-50",
    ),
    "certificates": Wing(
        purpose="certificates of training runs, and their audits",
        command="audit",
        summary="Check a certified run, and replay parts of it",
    ),
    "explanations": Wing(
        purpose="maps that explain the decisions of networks",
        command="explain",
        summary="Show which pixels of an image decide its class",
    ),
    "tiles": Wing(purpose="predictions for large images, tile by tile"),
    "backends.gpu": Wing(purpose="computing on GPUs"),
    "data.storage": Wing(purpose="images in object stores, such as s3:// and https://"),
    "trackers": Wing(purpose="records of runs for TensorBoard, MLflow and other programs"),
}


class MissingWing(UserError, ModuleNotFoundError):
    """Raised by the import of a wing that has been removed."""


class WingFinder:
    """The last finder of modules, which explains that a wing is missing."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Raise MissingWing for the folder of a wing, which no other finder has found."""
        folder = name.removeprefix("mpidl.")
        if folder in WINGS and name != folder:
            raise MissingWing(
                f"expected the folder {name.replace('.', '/')}/ ({WINGS[folder].purpose}), which "
                "this copy of mpidl does not have",
                name=name,
            )
        return None
