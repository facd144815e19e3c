"""Define `dl.audit`, which checks its arguments and audits a certified run."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.certificates import checks, recording, settings
from mpidl.certificates.auditor import Audit, Auditor
from mpidl.certificates.certificate import Certificate
from mpidl.certificates.chain import START
from mpidl.certificates.checks import UNCHECKED, Finding
from mpidl.certificates.replay import NEUTRAL, Material
from mpidl.certificates.segments import Selection
from mpidl.data.array_datastore import as_datastore
from mpidl.errors import UserError
from mpidl.files import reason
from mpidl.nn import Network
from mpidl.nn.network_check import need_network
from mpidl.ranks.failure import Signals
from mpidl.ranks.world import World
from mpidl.text import printable
from mpidl.training.optimizers.checks import CustomOptimizer, optimizer_spec
from mpidl.training.options.training_options import OPTIONS, TrainingOptions

if TYPE_CHECKING:
    from mpidl.data.array_datastore import Arrays
    from mpidl.data.datastore import Datastore
    from mpidl.nn.layers import Layer
    from mpidl.training.optimizers import Optimizer


def audit(
    run: str | os.PathLike[str],
    datastore: Datastore | Arrays | None = None,
    options: TrainingOptions | None = None,
    *,
    net: Network | None = None,
    optimizer: Optimizer | CustomOptimizer | None = None,
    layers: Iterable[type[Layer]] = (),
    test: Datastore | Arrays | None = None,
    steps: str | Sequence[int] | None = None,
    sample: int | None = None,
    seed: int | None = None,
    largest: int | None = None,
    salt: str | os.PathLike[str] | None = None,
    signers: str | os.PathLike[str] | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    world: World | None = None,
) -> Audit:
    """Check a certified run, and replay parts of it on any number of ranks. Collective.

    Parameters
    ----------
    run : path
        The folder of the run, or its certificate.
    datastore : Datastore or (images, labels), optional
        The images that the run was trained on, as for `dl.train`. Without images, only the files of
        the run are checked.
    options : TrainingOptions, optional
        The options of the run. They are necessary if options are functions or validation images;
        by default, the certificate describes them. Options that only affect speed, such as
        `device`, may have other values than in the run.
    net : Network, optional
        The network with the weights that the run began with. The default is a new network with the
        layers and the seed of the certificate.
    optimizer : optional
        An optimizer like the one that was passed to `dl.train`.
    layers : iterable of Layer classes
        The custom layer classes in the network.
    test : Datastore or (images, labels), optional
        The images of the test of the command `train`.
    steps : str or (int, int), optional
        The iterations to replay, such as ``"400:450"``. The default is all iterations.
    sample : int, optional
        Number of segments to draw and replay, in addition to those in which the result was formed.
        A segment is between two states from which a replay can start: checkpoints that the
        certificate covers, and the initial state.
    seed : int, optional
        Seed of this drawing. The default is a new seed.
    largest : int, optional
        Number of segments to replay in which the weights moved farthest for their learning rates.
    salt : path, optional
        File with the salt of the digests of the images. The default is certificate-salt.txt beside
        the certificate.
    signers : path, optional
        A public key that may sign, or ssh-keygen's list of allowed signers.
    checkpoints : path, optional
        Folder with the checkpoints of the run. The default is the folder of the certificate.
    world : World, optional
        The ranks that replay the run. The default is all ranks of the job.

    Returns
    -------
    Audit
        The findings. `is_equal` is True if nothing differs from the certificate.

    Raises
    ------
    UserError
        If the certificate cannot be read, or if an argument is invalid or missing.
    Fault
        If a signal stops the audit.
    """
    selection = Selection.of_arguments(steps, sample, seed, largest)
    world = World() if world is None else world
    auditor = Auditor(world, run)
    options = _checked_options(options, optimizer)
    texts = None if options is None else settings.options_of(options)
    auditor.check_files(_path(signers), texts)
    if auditor.certificate.disorder is not None:
        return auditor.result
    auditor.check_checkpoints(_path(checkpoints))
    if datastore is None:
        auditor.check_arithmetic()
        auditor.add(Finding("iterations", UNCHECKED, "not replayed, because there are no images"))
        return auditor.result
    material, source = _material(auditor, datastore, options, net, optimizer, layers)
    tested = None if test is None else as_datastore(test, "test")
    auditor.compare(material, source, tested, _path(salt))
    with Signals() as signals:
        auditor.replay(material, selection, signals, tested)
    return auditor.result


def _checked_options(options, optimizer):
    """Return the options with the learning rate of an optimizer, as `dl.train` uses them."""
    if options is not None and not isinstance(options, TrainingOptions):
        raise UserError(f"options: expected TrainingOptions, found {type(options).__name__}")
    rate = getattr(optimizer, "learning_rate", None)
    return options if options is None or rate is None else replace(options, learning_rate=rate)


def _path(path):
    return None if path is None else os.fspath(path)


def _material(auditor, datastore, options, net, optimizer, layers):
    """Return the material that a Python program passes, and what gave the initial weights."""
    start = auditor.certificate.of_kind(START)[0]
    expected = start["optimizer"]
    spec = None if optimizer is None else recording.plain(optimizer_spec(optimizer))
    if spec != expected:
        text = f"optimizer: expected {expected or 'none'}, as in the run, found {spec or 'none'}"
        raise UserError(text)
    replaced: dict[str, Any] = {}
    if options is not None:
        names = {name for name, value in NEUTRAL.items() if value is None}
        names |= {name for name in OPTIONS if callable(getattr(options, name))}
        replaced = {name: getattr(options, name) for name in names}
        if options.validation is not None:
            replaced["validation"] = as_datastore(options.validation, "validation")
    if net is not None:
        need_network(net)
        network, source = net, checks.Source("the network that was passed")
    else:
        if start["weights"] is not None:
            raise UserError(
                "net: expected the network with the weights that the run began with, of the file "
                f"with sha256 {start['weights']['sha256']}"
            )
        network = network_of(auditor.certificate, layers)
        source = checks.seed_of(auditor.certificate)
    store = as_datastore(datastore, "images to train on")
    copies = Material(
        store, lambda: copy.deepcopy(network), replaced, lambda: copy.deepcopy(optimizer)
    )
    return copies, source


def network_of(certificate: Certificate, layers: Iterable[type[Layer]] = ()) -> Network:
    """Return a new network with the layers and the seed of a certificate.

    Raises UserError if the layers are invalid, or if a custom class of layers is missing.
    """
    network, seed = certificate.of_kind(START)[0]["network"], checks.seed(certificate)
    try:
        with np.errstate(all="ignore"):  # layers of absurd sizes
            specs = [recording.numbers_of(layer) for layer in network["layers"]]
            return Network.from_spec(specs, network["input_shape"], layers, seed=seed)
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError, RecursionError) as error:
        name = printable(certificate.path)
        raise UserError(f"{name}: its network cannot be built: {reason(error)}") from None
