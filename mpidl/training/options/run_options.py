"""Options for the length of training, ranks, failures, and the output of a run."""

from collections.abc import Sequence
from typing import Literal

from mpidl.options.declaration import (
    Rule,
    at_least,
    choice,
    number_list,
    one_of,
    option,
    options_class,
    positive,
    text_or_none,
)


@options_class(group="Length and mini-batches")
class LengthOptions:
    """The options of `TrainingOptions` for epochs and mini-batches."""

    epochs: int = option(
        at_least(1),
        "Number of passes over the training set",
        default=30,
        resume="up",
        matlab="MaxEpochs",
    )
    max_iterations: int | None = option(
        at_least(1, optional=True),
        "Stop after this many mini-batches in total, including those before a resume",
        default=None,
    )
    batch_size: int = option(
        at_least(1),
        "Images per mini-batch, summed over all ranks",
        default=128,
        resume="fixed",
        matlab="MiniBatchSize",
    )
    batch_per_rank: int | None = option(
        at_least(1, optional=True),
        "Images per mini-batch on each rank; sets the batch size to this number times the number "
        "of ranks (the weights then depend on the number of ranks)",
        default=None,
        matlab="miniBatchSize*N",
    )
    accumulate: int = option(
        at_least(1),
        "Compute each mini-batch in up to this many parts, one after another, to save memory; "
        "--batch-size counts the images of all parts, and batch-norm statistics are computed "
        "separately for each part",
        default=1,
        resume="fixed",
    )


@options_class(group="Hardware and speed")
class RankOptions:
    """The options of `TrainingOptions` for the ranks and their checkpoints."""

    device: Literal["auto", "cpu", "gpu"] = choice(
        "Where the ranks compute; auto uses GPUs if every rank has one, else CPUs",
        default="auto",
        matlab="ExecutionEnvironment",
    )
    gpus: str | int | Sequence[int] | None = option(
        number_list("GPU indices such as 0,2"),
        "Indices of the visible GPUs to use on each host; the ranks of the host get them in this "
        "order; none uses all GPUs",
        default=None,
        matlab="gpuDevice",
    )
    graphs: Literal["auto", "off"] = choice(
        "Record a training step once and replay it, on GPUs as CUDA graphs (auto), or launch each "
        "kernel separately in every step (off)",
        default="auto",
    )
    precision: Literal["fp32", "bf16", "tf32"] = choice(
        "Precision of products: fp32 has the accuracy of float32 arithmetic; bf16 multiplies and "
        "stores activations in bfloat16, which is faster and needs less memory; tf32, on GPUs, "
        "rounds the inputs of convolutions and dense layers to 10-bit mantissas",
        default="fp32",
        resume="fixed",
    )
    threads: int = option(
        at_least(0),
        "Threads per rank; affects speed only; 0 divides the available cores evenly among the "
        "ranks that share them",
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
        "to set the shares according to each rank's speed in the previous epoch; affects speed "
        "only; none gives equal shares",
        default=None,
        matlab="WorkerLoad",
    )
    winograd: Literal["auto", "off", "fast"] = choice(
        "Winograd's algorithm for 3x3, 5x5 and large strided convolutions on CPUs: auto uses it "
        "if its rounding error is harmless, off never uses it, fast uses it whenever it is faster",
        default="auto",
        resume="fixed",
    )
    checkpoint_every: int = option(
        at_least(0),
        "Iterations between checkpoints, in addition to a checkpoint at the end of each epoch; 0 "
        "writes checkpoints only at the ends of epochs",
        default=0,
        group="Run and results",
        matlab="CheckpointFrequency",
    )
    checkpoint_keep: int = option(
        at_least(0),
        "Iterations between checkpoints that are kept in the folder checkpoints, such as "
        "checkpoints/00000400.h5, in addition to that of iteration 0; 0 keeps none of them",
        default=0,
        group="Run and results",
    )


@options_class(group="Hardware and speed")
class FailureOptions:
    """The options of `TrainingOptions` for failures of ranks."""

    on_nan: Literal["stop", "rollback"] = choice(
        "If the loss or a weight is NaN or infinite: stop, or return to the end of the last epoch "
        "or the last periodic checkpoint and halve the learning rate, at most 5 times",
        default="stop",
        group="Learning rate schedule",
    )
    on_lost_rank: Literal["stop", "shrink"] = choice(
        "If the process of a rank dies: stop, or continue on the remaining ranks and reach the "
        "same weights; shrink needs CPUs, Open MPI 5 and mpirun --with-ft ulfm",
        default="stop",
    )
    timeout: float = option(
        positive(), "Seconds to wait for an unresponsive rank before the run fails", default=300.0
    )


@options_class(group="Run and results")
class CertificateOptions:
    """The options of `TrainingOptions` for the certificate of a run."""

    certify: Literal["none", "private", "public"] | bool = option(
        one_of("none", "private", "public")._replace(bare="private"),
        "Write certificate.json, with which mpidl audit replays parts of the run: private, so that "
        "only an auditor with the salt of the run can test whether an image was in the data, or "
        "public; the flag without a value selects private",
        default="none",
        resume="fixed",
    )
    certify_every: int = option(
        at_least(1),
        "Iterations between the states that a certificate records; it also records the first and "
        "the last state, and the state at the end of each epoch",
        default=50,
    )
    certify_key: str | None = option(
        text_or_none("FILE"),
        "Sign the certificate with this private SSH key, by ssh-keygen",
        default=None,
    )


@options_class(group="Run and results")
class OutputOptions:
    """The options of `TrainingOptions` for the output of a run, and its seed."""

    verbose: Literal["on", "off"] | bool = choice(
        "Show training progress: a bar and a table on a terminal, otherwise log lines",
        default="on",
        group="Progress",
        matlab="Verbose",
    )
    verbose_every: int = option(
        at_least(0),
        "Iterations between log lines, with at most one line every 5 s; 0 logs no iteration, "
        "except the last iteration of a run that ends in the middle of an epoch",
        default=50,
        group="Progress",
        matlab="VerboseFrequency",
    )
    plots: Literal["training-progress", "none"] = choice(
        "Draw progress.png in the results folder if matplotlib is installed: during training at "
        "the end of an epoch, at most every 10 s, and at the end of the run",
        default="training-progress",
        group="Progress",
        matlab="Plots",
    )
    timeline: int | float = option(
        at_least(0, allow_inf=True)._replace(bare=100),
        "Iterations to record in timeline.json.gz in the results folder, a timeline for Perfetto "
        "of what each rank computes and waits for; the flag without a value records 100 "
        "iterations, and inf records the whole run",
        default=0,
    )
    timeline_mb: int = option(
        at_least(1),
        "Memory in MB for the timeline, divided among all ranks; the timeline ends early if the "
        "memory of a rank is full",
        default=32,
    )
    tensorboard: Literal["on", "off"] | bool = choice(
        "Write event files for TensorBoard to the results folder, with curves, augmented images, "
        "the confusion matrix, and histograms of weights and gradients",
        default="off",
    )
    track: str | None = option(
        text_or_none("NAME,NAME=TEXT,..."),
        "Record the run with these trackers, such as tensorboard or mlflow=mlruns",
        default=None,
    )
    seed: int = option(
        Rule(int, "between 0 and 2**63 - 1", 0, 2**63 - 1),
        "Seed of all random numbers: initial weights, splits, order and augmentation",
        default=0,
        resume="fixed",
    )
