"""Networks: layers, the network that holds their learnables and state, and the zoo."""

from mpidl.nn import zoo
from mpidl.nn.layers import BatchNorm, Built, Conv2D, Dense, Flatten, Layer, ReLU
from mpidl.nn.network import Network

__all__ = ["BatchNorm", "Built", "Conv2D", "Dense", "Flatten", "Layer", "Network", "ReLU", "zoo"]
