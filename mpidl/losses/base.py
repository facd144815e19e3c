"""The base class of losses of labels."""

from __future__ import annotations

from typing import Any, TypeAlias

from mpidl.autodiff import Var
from mpidl.blocks import Blocked
from mpidl.fold import Partial
from mpidl.nn import Network
from mpidl.nn.layers import Sigmoid, Softmax

# (loss,), (loss, number of correct labels), or also the number of labels that count and the weight
# of the mini-batch in a mean over mini-batches.
Sums: TypeAlias = tuple[Partial | Var, ...]


class LabelLoss:
    """A loss of labels and scores, for the argument `loss` of training and evaluation.

    A subclass defines the other methods, and the attribute `ignore_label`.
    """

    ignore_label: int | None

    @property
    def name(self) -> str:
        """The loss's name, such as "crossentropy"."""
        raise NotImplementedError

    def __call__(self, net: Network, images: Blocked, labels: Blocked) -> Sums:
        """Return the mean loss and the number of correct labels of a mini-batch.

        Parameters
        ----------
        net : Network
            The network.
        images : Blocked
            Images (N, C, H, W).
        labels : Blocked
            Labels or targets, as for `of_scores`.

        Returns
        -------
        tuple of Partial
            See `of_scores`.
        """
        return self.of_scores(self.scores(net, images), labels)

    def scores(self, net: Network, images: Blocked) -> Blocked:
        """Return the scores of a network before its last softmax or sigmoid, if it ends in one.

        Parameters
        ----------
        net : Network
            The network.
        images : Blocked
            Images (N, C, H, W).

        Returns
        -------
        Blocked
            Scores (N, K) or (N, K, ...).
        """
        return net.logits(images, Sigmoid if self._uses_sigmoid(net) else Softmax)

    def _uses_sigmoid(self, net):
        return False

    def of_scores(self, scores: Blocked | Var, labels: Blocked) -> Sums:
        """Return the sums of a mini-batch, given the scores of a network.

        Parameters
        ----------
        scores : Blocked
            Scores (N, K) or (N, K, ...).
        labels : Blocked
            Labels or targets.

        Returns
        -------
        tuple of Partial
            The loss and the number of correct labels, perhaps also the number of labels that count
            and the sum of their weights. Only the loss is differentiated.
        """
        raise NotImplementedError

    def check(self, net: Network, datastore: Any) -> None:
        """Raise a UserError if outputs, labels and this loss do not fit together.

        Parameters
        ----------
        net : Network
            The network.
        datastore : Datastore
            The images with their labels or targets.
        """
        raise NotImplementedError

    @property
    def is_balanced(self) -> bool:
        """Whether weights follow from the labels of the training set, by `for_images`."""
        return False

    def for_images(self, datastore: Any, outputs: int, world: Any = None) -> LabelLoss:
        """Return this loss with numbers instead of "balanced", for a training set. Collective.

        Parameters
        ----------
        datastore : Datastore
            The training set.
        outputs : int
            Number of outputs K of the network.
        world : World, optional
            The ranks that share the reading of labels and targets.

        Returns
        -------
        LabelLoss
            The loss. A class without images or pixels has the weight 0. A label without positive
            targets has the weight 1.
        """
        raise NotImplementedError

    def is_replayable(self, outputs: int) -> bool:
        """Return whether a recorded step of a CPU may replay this loss.

        Parameters
        ----------
        outputs : int
            Number of outputs K of the network.

        Returns
        -------
        bool
            Whether kernels compute all of it, with a divisor that does not depend on the labels.
        """
        raise NotImplementedError
