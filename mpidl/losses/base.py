"""The base class of losses that compare scores with labels."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from mpidl.core.blocks import Blocked
from mpidl.core.fold import Partial
from mpidl.core.tape import Var
from mpidl.nn.layers import Sigmoid, Softmax

if TYPE_CHECKING:
    from mpidl.nn import Network

# The result of a loss function: (loss,), (loss, correct), (loss, correct, count) or (loss, correct,
# count, weight). `correct` is the number of correct labels, and `count` is the number of labels
# that are not ignored. `weight` is the weight of the mini-batch in a mean over mini-batches.
Sums: TypeAlias = tuple[Partial | Var, ...]


class LabelLoss(abc.ABC):
    """A loss that compares scores with labels, for the argument `loss` of training and evaluation.

    Subclasses define the attribute `ignore_label` and the abstract methods.

    Attributes
    ----------
    ignore_label : int or None
        The label that is left out of the loss and the accuracy.
    separate_labels : bool
        Whether the outputs are scores of labels that may occur together, instead of classes.
    """

    ignore_label: int | None
    separate_labels: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the loss, such as "crossentropy"."""

    def __call__(self, net: Network, images: Blocked, labels: Blocked) -> Sums:
        """Return `of_scores` of the scores that a network gives images (N, C, H, W)."""
        return self.of_scores(self.scores(net, images), labels)

    def scores(self, net: Network, images: Blocked) -> Blocked:
        """Return the scores of a network before its final softmax or sigmoid, if it has one.

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
        return self.separate_labels

    def label_classes(self, outputs: int) -> int:
        """Return the number of classes that a label may be.

        Parameters
        ----------
        outputs : int
            Number of outputs K of the network.

        Returns
        -------
        int
            K, or 2 if an output is the score of a label that may occur or not.
        """
        return 2 if self.separate_labels else outputs

    @abc.abstractmethod
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
            The loss and the number of correct labels. Some losses also return the number of labels
            that are not ignored, and the sum of their weights. Only the loss can be differentiated.
        """

    @abc.abstractmethod
    def check(self, net: Network, datastore: Any) -> None:
        """Raise UserError if the outputs, the labels and this loss do not match.

        Parameters
        ----------
        net : Network
            The network.
        datastore : Datastore
            The images with their labels or targets.
        """

    @property
    def is_balanced(self) -> bool:
        """Whether `for_images` computes weights from the labels of the training set."""
        return False

    def for_images(self, datastore: Any, outputs: int, world: Any = None) -> LabelLoss:
        """Return this loss with numbers instead of "balanced" weights. Collective.

        Parameters
        ----------
        datastore : Datastore
            The training set.
        outputs : int
            Number of outputs K of the network.
        world : World, optional
            The ranks, which divide the reading of labels and targets among themselves. By default,
            this process reads all of them.

        Returns
        -------
        LabelLoss
            The loss. A class without images or pixels has the weight 0. A label without positive
            targets has the weight 1.
        """
        return self

    @abc.abstractmethod
    def is_replayable(self, outputs: int) -> bool:
        """Return whether a recorded training step on a CPU may contain this loss.

        Only C kernels can be replayed, and only if no divisor depends on the labels.

        Parameters
        ----------
        outputs : int
            Number of outputs K of the network.

        Returns
        -------
        bool
            Whether the loss can be replayed.
        """
