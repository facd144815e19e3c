"""Run another library as one side of a comparison: `python -m benchmarks.others TASK ADDRESS`.

JAX and MyGrad train, and onnxruntime predicts. The library runs in one process, with the same
layers, initial weights and images as mpidl. The library may be installed for another Python
interpreter (`compare --with jax --with-python PATH`), which must be able to import mpidl.
"""

import argparse
import os
import sys

import numpy as np

from benchmarks import machine, prediction, subject, turns
from mpidl.errors import UserError
from mpidl.ops import check
from mpidl.training.options import configuration


def main(argv=None):
    """Answer the questions of the benchmark (see `turns`) until it closes the connection.

    `argv` holds the task, as JSON, and the address of the socket.
    """
    job, address = subject.join(argv, 0)
    net, images, labels = subject.prepare(job)
    if job.package == "onnxruntime":
        version = configuration.version_of("onnxruntime")
    else:
        new_step, version = LIBRARIES[job.package](net, images, labels, job.threads)

    def describe():
        return {"versions": {job.package: version}, "arithmetic": job.package}

    if job.package == "onnxruntime":
        scores = prediction.onnx_pass(net, images, job.threads)
        prediction.serve(address, scores, labels, describe)
        os._exit(0)
    step = new_step()

    def losses(count):
        other = new_step()
        return [other() for _ in range(count)]

    def steps(count):
        return turns.timed_steps(step, count)

    turns.serve(address, 0, describe, losses, steps)
    os._exit(0)


def layer_plan(net):
    """Return (kind, name, arguments) for each layer of a network.

    Raises
    ------
    UserError
        If the steps of this module do not support a layer.
    """
    plan = []
    for layer in net.layers:
        kind, args = type(layer).__name__, {}
        if kind in ("Conv2D", "MaxPool2D", "AveragePool2D"):
            (top, bottom), (left, right) = check.pads(layer.name, layer.padding)
            stride = layer.size if layer.stride is None else layer.stride
            args = {
                "size": check.pair(layer.name, "size", layer.size, 1),
                "stride": check.pair(layer.name, "stride", stride, 1),
                "pads": ((top, bottom), (left, right)),
            }
            plain = kind != "Conv2D" or (layer.dilation, layer.groups) == (1, 1)
            if not plain or (top, left) != (bottom, right):
                raise UserError(f"layer {layer.name}: not compared with other libraries")
        elif kind == "BatchNorm":
            args = {"epsilon": layer.epsilon}
        elif kind not in ("ReLU", "Flatten", "Dense"):
            raise UserError(f"layer {layer.name}: {kind} is not compared with other libraries")
        plan.append((kind, layer.name, args))
    return plan


def jax_step(net, images, labels, threads):
    """Return a function that creates JAX's step, and JAX's version.

    XLA compiles the step as a whole.
    """
    os.environ["XLA_FLAGS"] = (
        f"--xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'} "
        f"intra_op_parallelism_threads={threads}"
    )
    import jax
    from jax import numpy as jnp

    layers = layer_plan(net)

    def window(x, args, start, combine):
        sizes, strides = (1, 1, *args["size"]), (1, 1, *args["stride"])
        return jax.lax.reduce_window(
            x, start, combine, sizes, strides, ((0, 0), (0, 0), *args["pads"])
        )

    def loss_of(p, x, labels):
        for kind, name, args in layers:
            if kind == "Conv2D":
                weight, stride, pads = p[f"{name}.weight"], args["stride"], args["pads"]
                y = jax.lax.conv_general_dilated(x, weight, stride, pads)
                x = y + p[f"{name}.bias"][:, None, None]
            elif kind == "BatchNorm":
                axes = (0, 2, 3) if x.ndim == 4 else (0,)
                mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
                shape = mean.shape[1:]
                x = (x - mean) * jax.lax.rsqrt(variance + args["epsilon"])
                x = x * p[f"{name}.gamma"].reshape(shape) + p[f"{name}.beta"].reshape(shape)
            elif kind == "ReLU":
                x = jax.nn.relu(x)
            elif kind == "MaxPool2D":
                x = window(x, args, -jnp.inf, jax.lax.max)
            elif kind == "AveragePool2D":
                x = window(x, args, 0.0, jax.lax.add) / float(np.prod(args["size"]))
            else:
                x = x.reshape(len(x), -1)
                if kind == "Dense":
                    x = x @ p[f"{name}.weight"].T + p[f"{name}.bias"]
        scores = jax.nn.log_softmax(x)
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    @jax.jit
    def update(p, v, x, labels):
        loss, g = jax.value_and_grad(loss_of)(p, x, labels)
        v = {k: subject.MOMENTUM * v[k] + g[k] for k in p}
        return loss, {k: p[k] - subject.RATE * v[k] for k in p}, v

    x, y = jnp.asarray(images), jnp.asarray(labels)

    def new_step():
        p = {k: jnp.asarray(value) for k, value in net.parameters.items()}
        v = {k: jnp.zeros_like(value) for k, value in p.items()}

        def step():
            nonlocal p, v
            loss, p, v = update(p, v, x, y)
            return float(jax.block_until_ready((loss, p, v))[0])

        return step

    return new_step, jax.__version__


def mygrad_step(net, images, labels, threads):
    """Return a function that creates MyGrad's step, and MyGrad's version.

    MyGrad computes with NumPy and differentiates automatically.
    """
    import mygrad
    from mygrad.nnet import layers as mg
    from mygrad.nnet.activations import relu
    from mygrad.nnet.losses import softmax_crossentropy

    layers = layer_plan(net)

    def loss_of(p, x):
        for kind, name, args in layers:
            if kind == "Conv2D":
                pads = [before for before, _ in args["pads"]]
                y = mg.conv_nd(x, p[f"{name}.weight"], stride=args["stride"], padding=pads)
                x = y + p[f"{name}.bias"].reshape(1, -1, 1, 1)
            elif kind == "BatchNorm":
                gamma, beta = p[f"{name}.gamma"], p[f"{name}.beta"]
                x = mg.batchnorm(x, gamma=gamma, beta=beta, eps=args["epsilon"])
            elif kind == "ReLU":
                x = relu(x)
            elif kind == "MaxPool2D" and args["pads"] == ((0, 0), (0, 0)):
                x = mg.max_pool(x, args["size"], args["stride"])
            elif kind == "AveragePool2D" and x.shape[2:] == args["size"]:
                x = x.mean(axis=(2, 3))
            elif kind in ("Flatten", "Dense"):
                x = x.reshape(len(x), -1)
                if kind == "Dense":
                    x = mygrad.matmul(x, p[f"{name}.weight"].T) + p[f"{name}.bias"]
            else:
                raise UserError(f"layer {name}: MyGrad has no such {kind}")
        return softmax_crossentropy(x, labels)

    def new_step():
        p = {k: mygrad.tensor(value.copy()) for k, value in net.parameters.items()}
        v = {k: np.zeros_like(value.data) for k, value in p.items()}

        def step():
            loss = loss_of(p, images)
            loss.backward()
            for k, value in p.items():
                v[k] = subject.MOMENTUM * v[k] + value.grad.astype(np.float32)
                value.data -= subject.RATE * v[k]
                value.null_grad()
            return float(loss.data)

        return step

    return new_step, mygrad.__version__


LIBRARIES = {"jax": jax_step, "mygrad": mygrad_step}


def side(library: str, options: argparse.Namespace, folder: str) -> turns.Side:
    """Start the process of another library and return its Side.

    Parameters
    ----------
    library : str
        "jax", "mygrad" or, for predictions, "onnxruntime".
    options : argparse.Namespace
        Parsed command line of the sub-command.
    folder : str
        Folder for the side's files.

    Raises
    ------
    Lost
        If the options request several ranks, or if the process does not start.
    """
    if options.ranks > 1:
        raise turns.Lost(library, "measured in one process only")
    task = subject.task(options, machine.cores_of(1, options.threads), package=library)
    command = [options.with_python or sys.executable, "-m", "benchmarks.others", task]
    variables = turns.environment_of_checkout()
    return turns.Side(
        library, [command], 1, variables, folder, max(options.timeout, turns.PATIENCE)
    )


if __name__ == "__main__":
    main()
