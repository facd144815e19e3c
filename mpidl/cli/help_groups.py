"""Groups of options, in the order in which --help and --help-all show the groups."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

COMMON = "Common options"
UNGROUPED = "Other options"  # flags that `GROUPS` does not name
SHORT_LIST = 13  # a command with more options than this has a short --help

# {title: option names in Python}. Within a group, --help keeps the order of declaration.
GROUPS: dict[str, Sequence[str]] = {
    "Run and results": (
        *("ranks", "srun", "network", "model", "layers", "out", "resume", "overwrite", "config"),
        *("seed", "preview", "upload", "checkpoint_every", "top_k", "confusion", "metrics"),
        *("activations",),
        *("audit_every", "timeline", "timeline_mb", "tensorboard", "mlflow", "wandb"),
    ),
    "Images": (
        *("data", "test_data", "test_fraction", "shuffle", "sampling"),
        *("partial_minibatch", "normalization", "colour", "resize", "cover", "centre_crop"),
        *("on_bad_image",),
    ),
    "Augmentation": (
        *("flip", "flip_mode", "translate", "rotation", "scale", "shear", "fill", "random_crop"),
        *("resized_crop", "crop_area", "crop_aspect"),
        *("brightness", "contrast", "saturation", "hue"),
        *("erase", "erase_area", "erase_aspect", "erase_value"),
        *("mixup", "cutmix", "mix_probability", "test_flips"),
    ),
    "Study": (
        *("weak", "repeat", "accuracy", "predict", "link", "ranks_per_node", "probe_ranks"),
        *("probe_seconds", "probe", "table"),
    ),
    "Object stores": ("endpoint_url", "requests", "cache_dir", "retry_seconds"),
    "Start from weights": ("weights", "new_layer_factor", "freeze_up_to"),
    "Length and mini-batches": (
        "epochs",
        "max_iterations",
        "batch_size",
        "batch_per_rank",
        "accumulate",
    ),
    "Solver": (
        *(
            "loss",
            "class_weights",
            "positive_weights",
            "label_smoothing",
            "ignore_label",
            "focal_gamma",
            "solver",
            "learning_rate",
            "scale_rate",
            "linear_scaling",
            "momentum",
            "nesterov",
        ),
        *("gradient_decay_factor", "squared_gradient_decay_factor", "epsilon"),
        *("trust_coefficient", "l2", "decay_exclude"),
        *("gradient_threshold", "gradient_threshold_method"),
        *("average", "average_decay", "average_start", "average_every", "average_use"),
        *("batchnorm", "batchnorm_statistics"),
    ),
    "Learning rate schedule": (
        *("learn_rate_schedule", "learn_rate_drop_factor", "learn_rate_drop_period"),
        *("learn_rate_power", "learn_rate_final_factor", "on_nan"),
        *("warmup_iterations", "warmup_epochs", "warmup_factor"),
    ),
    "Validation": (
        *("validation_data", "validation_fraction", "fold", "validation_frequency"),
        *("validation_patience", "output_network"),
    ),
    "Hardware and speed": (
        *("device", "gpus", "graphs", "precision", "threads", "worker_load", "winograd"),
        *("workers", "prefetch", "cache_mb", "on_lost_rank", "timeout"),
    ),
    "Progress": ("verbose", "verbose_every", "plots", "monitor"),
}


def sections(
    actions: Iterable[argparse.Action], common: Sequence[str]
) -> dict[str, list[argparse.Action]]:
    """Divide the options of a parser into the sections of --help-all.

    Parameters
    ----------
    actions : iterable of Action
        The options, without positional arguments and flags for help.
    common : sequence of str
        Names of the most common options, in the order in which the first section shows them.

    Returns
    -------
    dict
        {title: options}, without empty sections. Every option is in exactly one section. A command
        with few options has a single section.
    """
    options = list(actions)
    if not common and len(options) <= SHORT_LIST:
        return {"Options": options} if options else {}
    titles = {name: title for title, names in GROUPS.items() for name in names}
    titles |= dict.fromkeys(common, COMMON)
    groups: dict[str, list[argparse.Action]] = {title: [] for title in (COMMON, *GROUPS, UNGROUPED)}
    for action in options:
        groups[titles.get(action.dest, UNGROUPED)].append(action)
    groups[COMMON].sort(key=lambda action: common.index(action.dest))
    return {title: members for title, members in groups.items() if members}
