"""Options for the ranks of a run: where they compute, how they fail, and what a run shows.

This module does not import annotations from `__future__`, so help() shows the annotations as types.
"""

from collections.abc import Sequence
from typing import Literal

from mpidl.training.options.option_types import (
    ON_OFF,
    Rule,
    at_least,
    choice,
    number_list,
    one_of,
    option,
    options_class,
    positive,
)


@options_class
class RunOptions:
    """The options of `TrainingOptions` for the ranks and files of a run."""

    device: Literal["auto", "cpu", "gpu"] = choice(
        "Where the ranks compute; auto uses GPUs if every rank has one, else CPUs",
        default="auto",
        matlab="ExecutionEnvironment",
    )
    gpus: str | int | Sequence[int] | None = option(
        number_list("GPU indices such as 0,2"),
        "Indices of the visible GPUs to use on each host, assigned to its ranks in this order; "
        "none uses all",
        default=None,
        matlab="gpuDevice",
    )
    graphs: Literal["auto", "off"] = choice(
        "Whether a training step is recorded once and replayed, on GPUs as CUDA graphs (auto), or "
        "launches each kernel separately (off)",
        default="auto",
    )
    precision: Literal["fp32", "tf32"] = choice(
        "Precision of matrix products on a GPU's tensor cores: fp32 has the accuracy of float32 "
        "arithmetic; tf32 is faster but rounds inputs to 10-bit mantissas",
        default="fp32",
        resume="fixed",
    )
    threads: int = option(
        at_least(0),
        "Threads per rank; affects speed only; 0 divides the available cores among the ranks that "
        "share them",
        default=0,
    )
    worker_load: str | Sequence[float] | None = option(
        Rule(
            str,
            "measured, or a number per rank such as 1,1,0,1",
            choices=("measured",),
            pattern=r"[0-9]+(\.[0-9]{1,3})?(,[0-9]+(\.[0-9]{1,3})?)*",
            separator=",",
            optional=True,
        ),
        "Relative share of each mini-batch for each rank (0 gives a rank no work), or measured "
        "to use each rank's speed in the previous epoch; affects speed only; none shares equally",
        default=None,
        matlab="WorkerLoad",
    )
    winograd: Literal["auto", "off", "fast"] = choice(
        "Winograd's algorithm for 3x3, 5x5 and large strided convolutions on CPUs: auto uses it "
        "where its rounding error is harmless, off never, fast wherever it is faster",
        default="auto",
        resume="fixed",
    )
    checkpoint_every: int = option(
        at_least(0),
        "Iterations between checkpoints, in addition to one at the end of each epoch; 0 writes "
        "only the latter",
        default=0,
        matlab="CheckpointFrequency",
    )
    audit_every: int = option(
        at_least(0),
        "Iterations between comparisons of the weights of all ranks, which name a rank with wrong "
        "bytes; checkpoints always compare them; 0 adds no further comparisons",
        default=0,
    )
    on_nan: Literal["stop", "rollback"] = choice(
        "If the loss or a weight is NaN or infinite: stop, or return to the last epoch or periodic "
        "checkpoint and continue with half the learning rate, at most 5 times",
        default="stop",
    )
    on_lost_rank: Literal["stop", "shrink"] = choice(
        "If the process of a rank dies: stop, or continue on the ranks that are left, to the same "
        "weights; the latter needs Open MPI 5 and mpirun --with-ft ulfm, and CPUs",
        default="stop",
    )
    timeout: float = option(
        positive(), "Seconds to wait for an unresponsive rank before the run fails", default=300.0
    )
    verbose: Literal["on", "off"] | bool = option(
        one_of(*ON_OFF),
        "Show training progress: a bar and a table on a terminal, lines elsewhere",
        default="on",
        matlab="Verbose",
    )
    verbose_every: int = option(
        at_least(0),
        "Iterations between log lines, with at most one line every 5 s; 0 logs no iterations, "
        "except a final one that does not end an epoch",
        default=50,
        matlab="VerboseFrequency",
    )
    plots: Literal["training-progress", "none"] = choice(
        "Draw progress.png in the results folder if matplotlib is installed: at the end of "
        "epochs, at most every 10 s, beside the training; and at the end of the run",
        default="training-progress",
        matlab="Plots",
    )
    timeline: int | float = option(
        at_least(0, allow_inf=True)._replace(bare=100),
        "Iterations to record in timeline.json.gz in the results folder, which Perfetto shows: "
        "what each rank computes and waits for; the flag alone records 100, inf the whole run",
        default=0,
    )
    timeline_mb: int = option(
        at_least(1),
        "Memory in MB for the spans of --timeline, on all ranks together; the timeline is cut "
        "when a rank's part is full",
        default=32,
    )
    tensorboard: Literal["on", "off"] | bool = option(
        one_of(*ON_OFF),
        "Write event files for TensorBoard to the results folder, with curves, augmented images, "
        "the confusion matrix, and histograms of weights and gradients",
        default="off",
    )
