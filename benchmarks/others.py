"""Other libraries' side of a comparison: `python -m benchmarks.others WHAT ADDRESS`.

JAX and MyGrad, one process, the same layers, initial weights and images. They may be installed in
another Python, which has to import mpidl: `compare --with jax --with-python PATH`.
"""

import json
import os
import sys

import numpy as np

from benchmarks import machine, subject, turns
from mpidl.cli import verify
from mpidl.errors import UserError
from mpidl.ops import check


def main(argv=None):
    """Take part until the other end hangs up; argv: what to run, as JSON, and the address."""
    text, address = sys.argv[1:] if argv is None else argv
    what = json.loads(text)
    os.sched_setaffinity(0, what["cores"])
    net = subject.network(what["network"], what["image"], what["seed"], dropout=False)
    images, labels = subject.mini_batch(net.input_shape, what["batch_size"], what["seed"])
    new_step, version = LIBRARIES[what["library"]](net, images, labels, what["threads"])
    step = new_step()

    def about():
        return {"versions": {what["library"]: version}, "arithmetic": what["library"]}

    def losses(count):
        other = new_step()
        return [other() for _ in range(count)]

    def steps(count):
        return turns.timed_steps(step, count)

    turns.serve(address, 0, {f.__name__: f for f in (about, losses, steps)})
    os._exit(0)


def plan(net):
    """The layers as (kind, name, arguments), of those kinds that the libraries here have."""
    found = []
    for layer in net.layers:
        kind, how = type(layer).__name__, {}
        if kind in ("Conv2D", "MaxPool2D", "AveragePool2D"):
            (top, bottom), (left, right) = check.pads(layer.name, layer.padding)
            stride = layer.size if layer.stride is None else layer.stride
            how = {
                "size": check.pair(layer.name, "size", layer.size, 1),
                "stride": check.pair(layer.name, "stride", stride, 1),
                "pads": ((top, bottom), (left, right)),
            }
            plain = kind != "Conv2D" or (layer.dilation, layer.groups) == (1, 1)
            if not plain or (top, left) != (bottom, right):
                raise UserError(f"layer {layer.name}: not compared with other libraries")
        elif kind == "BatchNorm":
            how = {"epsilon": layer.epsilon}
        elif kind not in ("ReLU", "Flatten", "Dense"):
            raise UserError(f"layer {layer.name}: {kind} is not compared with other libraries")
        found.append((kind, layer.name, how))
    return found


def jax_step(net, images, labels, threads):
    """JAX: the whole step compiled by XLA."""
    os.environ["XLA_FLAGS"] = (
        f"--xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'} "
        f"intra_op_parallelism_threads={threads}"
    )
    import jax
    from jax import numpy as jnp

    layers = plan(net)

    def window(x, how, start, combine):
        sizes, strides = (1, 1, *how["size"]), (1, 1, *how["stride"])
        return jax.lax.reduce_window(
            x, start, combine, sizes, strides, ((0, 0), (0, 0), *how["pads"])
        )

    def loss_of(p, x, labels):
        for kind, name, how in layers:
            if kind == "Conv2D":
                y = jax.lax.conv_general_dilated(x, p[f"{name}.weight"], how["stride"], how["pads"])
                x = y + p[f"{name}.bias"][:, None, None]
            elif kind == "BatchNorm":
                axes = (0, 2, 3) if x.ndim == 4 else (0,)
                mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
                shape = mean.shape[1:]
                x = (x - mean) * jax.lax.rsqrt(variance + how["epsilon"])
                x = x * p[f"{name}.gamma"].reshape(shape) + p[f"{name}.beta"].reshape(shape)
            elif kind == "ReLU":
                x = jax.nn.relu(x)
            elif kind == "MaxPool2D":
                x = window(x, how, -jnp.inf, jax.lax.max)
            elif kind == "AveragePool2D":
                x = window(x, how, 0.0, jax.lax.add) / float(np.prod(how["size"]))
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
    """MyGrad: NumPy under automatic differentiation."""
    import mygrad
    from mygrad.nnet import layers as mg
    from mygrad.nnet.activations import relu
    from mygrad.nnet.losses import softmax_crossentropy

    layers = plan(net)

    def loss_of(p, x):
        for kind, name, how in layers:
            if kind == "Conv2D":
                pads = [before for before, _ in how["pads"]]
                y = mg.conv_nd(x, p[f"{name}.weight"], stride=how["stride"], padding=pads)
                x = y + p[f"{name}.bias"].reshape(1, -1, 1, 1)
            elif kind == "BatchNorm":
                gamma, beta = p[f"{name}.gamma"], p[f"{name}.beta"]
                x = mg.batchnorm(x, gamma=gamma, beta=beta, eps=how["epsilon"])
            elif kind == "ReLU":
                x = relu(x)
            elif kind == "MaxPool2D" and how["pads"] == ((0, 0), (0, 0)):
                x = mg.max_pool(x, how["size"], how["stride"])
            elif kind == "AveragePool2D" and x.shape[2:] == how["size"]:
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


def side(library, chosen, folder):
    """The Side of another library; chosen: the command's arguments. Raises Lost."""
    if chosen.ranks > 1:
        raise turns.Lost(library, "measured in one process only")
    what = {
        "network": chosen.network,
        "image": chosen.image,
        "batch_size": chosen.batch_size,
        "seed": chosen.seed,
        "threads": chosen.threads,
        "library": library,
        "cores": machine.cores_of(1, chosen.threads)[0],
    }
    python = chosen.with_python or sys.executable
    command = [python, "-m", "benchmarks.others", json.dumps(what)]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = verify.environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    return turns.Side(library, [command], 1, environment, folder, max(chosen.timeout, 900.0))


if __name__ == "__main__":
    main()
