"""Define what `run/gpu-check` computes: FULL on a GPU, SMALL for a try of the check itself."""

import os
from typing import Any, NamedTuple

from benchmarks import subject

SMALL_NETWORKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "small_networks.py")


class Sizes(NamedTuple):
    """Networks, data and counts of the stages.

    Attributes
    ----------
    networks : dict
        Networks of the parity stage, {title: (value of --network, image shape or None)}, the
        largest one last.
    each_function_once : bool
        Whether "every op" is only the first case of each function.
    trained : str
        Network to train, a value of --network.
    epochs, iterations, stop : int
        Epochs of the training stage, and iterations of the identity stage: of a full run, and
        before a run is resumed.
    options : dict
        Training options that replace those of the recipe of the digits network.
    timing : dict
        Steps to time, {call: [(network, batch size, image shape or None)]}.
    rounds : int
        Turns of each timed step.
    torch_device : str
        PyTorch's device. On "cpu", PyTorch's side runs only to try the check.
    tests : tuple of str
        Arguments of pytest.
    """

    networks: dict[str, tuple]
    each_function_once: bool
    trained: str
    epochs: int
    iterations: int
    stop: int
    options: dict[str, Any]
    timing: dict[str, list]
    rounds: int
    torch_device: str
    tests: tuple[str, ...]

    @property
    def is_small(self) -> bool:
        """Whether these are the sizes for a try of the check."""
        return self.torch_device == "cpu"

    def nets(self):
        """Return the networks of the parity stage, {title: Network}."""
        return {title: subject.network(*arguments) for title, arguments in self.networks.items()}


def _small(function, shape=(1, 8, 8)):
    return f"{SMALL_NETWORKS}:{function}", shape


FULL = Sizes(
    networks={name: (name, None) for name in ("digits", "cifar", "resnet18")},
    each_function_once=False,
    trained="digits",
    epochs=20,
    iterations=90,  # an epoch has 71 and ends with a smaller mini-batch
    stop=40,
    options={},
    timing={
        "quick": [("digits", 128, None), ("cifar", 1024, None), ("resnet18", 128, None)],
        "second": [("resnet50", 64, None)],
    },
    rounds=5,
    torch_device="cuda",
    tests=("tests/backends/test_conformance.py", "tests/backends/gpu"),
)
SMALL = Sizes(
    networks={name: _small(name) for name in ("plain", "residual")},
    each_function_once=True,
    trained=_small("plain")[0],
    epochs=4,
    iterations=3,
    stop=1,
    options={"batch_size": 16},
    timing={
        "quick": [(_small("plain")[0], 16, (1, 8, 8))],
        "second": [(_small("shortcut")[0], 16, (1, 8, 8))],
    },
    rounds=1,
    torch_device="cpu",
    tests=("tests/backends/test_conformance.py", "-k", "gpu_computes and channel_sums"),
)
BY_NAME = {"full": FULL, "small": SMALL}
