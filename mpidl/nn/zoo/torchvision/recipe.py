"""What torchvision's networks share: the usual images, and options for training on them."""

from typing import Any

SHAPE = (3, 224, 224)

# From torchvision's reference scripts: SGD with momentum, and a learning rate that is divided by 10
# every 30 epochs.
RECIPE: dict[str, Any] = {
    "learn_rate_schedule": "piecewise",
    "learn_rate_drop_factor": 0.1,
    "learn_rate_drop_period": 30,
    "momentum": 0.9,
    "shuffle": "every-epoch",
    "epochs": 90,
    "batch_size": 256,
    "scale_rate": 256,
    "l2": 1e-4,
    "flip": "x",
    "batchnorm_statistics": "moving",
}
