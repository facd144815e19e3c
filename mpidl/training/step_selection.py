"""Create the mini-batch queue and the training step that suit a run."""

from __future__ import annotations

from mpidl import losses
from mpidl.data import MinibatchQueue
from mpidl.errors import UserError
from mpidl.training.steps import EagerStep


def make_step(run, queue_options, balancer):
    """Create the mini-batch queue and the training step for the device of a `Run`; return both.

    `queue_options` are the arguments of `MinibatchQueue` other than datastore, batch size, seed,
    world and shuffling. `balancer`, a LoadBalancer, measures each rank's time per block; None if
    the shares are fixed. Raise UserError if an option or the optimizer does not work on a GPU.
    """
    net, optimizer, loss, options = run.net, run.optimizer, run.loss, run.options
    datastore, world, advice = run.datastore, run.world, run.session.advice
    arguments = datastore, options.batch_size, options.seed, world, options.shuffle
    labels_per_image = losses.labels_per_image(net, datastore)
    if options.accumulate > 1:
        from mpidl.training import accumulation

        accumulation.check(options, loss, world.device)
    if world.device is None:
        from mpidl.training import cpu_step  # only ranks without a GPU record on the CPU
        from mpidl.training.replayed_step import ReplayedStep

        is_recordable = cpu_step.is_recordable(net, optimizer, loss, options)
        step_class = ReplayedStep if is_recordable else EagerStep
        queue = MinibatchQueue(*arguments, **queue_options)
        queue.parts = options.accumulate
        step = step_class(net, optimizer, loss, world, labels_per_image, balancer, advice)
        if options.accumulate > 1:
            step.compute_parts()
        return queue, step
    from mpidl.data.loading.device_queue import DeviceQueue  # only ranks with a GPU import GPU code
    from mpidl.training.gpu_step import GPUStep

    if options.batchnorm == "local":
        raise UserError("--batchnorm local: on GPUs, the statistics are global; use --device cpu")
    if balancer:
        raise UserError(
            "--worker-load measured: on GPUs, the shares are fixed when the step is recorded; "
            "give numbers, or use --device cpu"
        )
    missing = [
        name for name in ("apply", "prepare", "numbers", "advance") if not hasattr(optimizer, name)
    ]
    if missing:
        raise UserError(
            f"optimizer: {type(optimizer).__name__} has no {', '.join(missing)}, which a recorded "
            "step on a GPU needs (see mpidl.training.optimizers.Optimizer); use --device cpu"
        )
    queue = DeviceQueue(*arguments, **queue_options)

    def record():
        subject = net, optimizer, loss, world, labels_per_image
        return GPUStep(*subject, queue.reader(), advice, options.graphs != "off")

    try:
        return queue, record()
    except MemoryError:
        if not queue.resident:
            raise
    queue.resident = False  # after the `except` block, because the error refers to the memory
    return queue, record()
