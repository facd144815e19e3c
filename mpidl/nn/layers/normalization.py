"""Batch normalization and cross-channel normalization."""

from dataclasses import dataclass, field

from mpidl import backends, ops
from mpidl.nn.layers.base import Built, Layer
from mpidl.ops import check
from mpidl.ops.lrn import check_window


@dataclass
class BatchNorm(Layer):
    """Batch normalization; `decay` is the weight of a new mini-batch in the running state.

    The learning rate and the L2 regularization of gamma (the scale) and beta (the offset) are those
    of the optimizer times the factors; with learning rates of 0 they are not differentiated, and
    the mini-batch goes on to normalize by its own statistics.
    """

    epsilon: float = 1e-5
    decay: float = 0.1
    name: str | None = None

    scale_learn_rate_factor: float = field(default=1.0, kw_only=True)
    offset_learn_rate_factor: float = field(default=1.0, kw_only=True)
    scale_l2_factor: float = field(default=0.0, kw_only=True)
    offset_l2_factor: float = field(default=0.0, kw_only=True)

    def factors(self, learnable):
        return super().factors({"gamma": "scale", "beta": "offset"}[learnable])

    def build(self, shape):
        numbers = check.are_numbers(self.epsilon, self.decay)
        if not (numbers and self.epsilon > 0 and 0 <= self.decay <= 1):
            raise ValueError(
                f"{self.name}: expected epsilon > 0 and a decay from 0 to 1, got {self.epsilon!r} "
                f"and {self.decay!r}"
            )
        c = (shape[0],)
        return Built(
            shape, {"gamma": (c, 1.0), "beta": (c, 0.0)}, {"mean": (c, 0.0), "variance": (c, 1.0)}
        )

    def _keys(self):
        return f"{self.name}.mean", f"{self.name}.variance"

    def running(self, at):
        """The running mean and variance."""
        return tuple(at.state[key] for key in self._keys())

    def recorder(self, at):
        """What takes a mini-batch's mean and variance into the running state."""

        def record(*statistics):
            keys = self._keys()
            olds = [at.state[key] for key in keys]
            news = backends.of_array(olds[0]).running(olds, statistics, self.decay)
            at.state.update(zip(keys, news, strict=True))

        return record

    def forward(self, x, at):
        if not at.training:
            return ops.batchnorm_predict(
                x, *self.running(at), at["gamma"], at["beta"], epsilon=self.epsilon
            )
        return ops.batchnorm(
            x,
            at["gamma"],
            at["beta"],
            epsilon=self.epsilon,
            scope=at.batchnorm,
            record=self.recorder(at),
        )


@dataclass
class CrossChannelNorm(Layer):
    """Cross-channel (local response) normalization, as `ops.cross_channel_norm`.

    window: how many channels a sum of squares goes over.
    """

    window: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 2.0
    name: str | None = None

    def build(self, shape):
        check_window(self.name, self.window, self.alpha, self.beta, self.k)
        return Built(shape)

    def forward(self, x, at):
        return ops.cross_channel_norm(x, self.window, alpha=self.alpha, beta=self.beta, k=self.k)
