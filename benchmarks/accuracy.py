"""`python -m benchmarks accuracy`: the error of every layer's activations and gradients.

The truth is the same step in float64, computed twice: by our NumPy reference and by PyTorch, which
share no code. A ReLU or a maximum that rounding turned the other way would show as an error of
1e-3 in the gradients below it, in any library, and says nothing of how exact the sums are. So each
float64 step takes the decisions of the float32 step it is compared with: which activations were
positive, which pixel was the largest of its window.

The error of an array is relative: |a - b| / |b| in the Euclidean norm, and the largest |a - b| over
the largest |b|. Arrays that are zero but for rounding (the gradient of a bias that a batch
normalization takes away again) have no such error and are left out.
"""

import importlib.util

import numpy as np

from benchmarks import machine, modules, subject
from mpidl import ops
from mpidl.autodiff import Var, op, value_and_grad
from mpidl.backends import REFERENCE as reference
from mpidl.blocks import OneRank, from_images, share
from mpidl.errors import Fault, UserError
from mpidl.nn import Network
from mpidl.nn.layers import LayerContext
from mpidl.ops.pool import windows
from mpidl.training.options import configuration

NOTHING = 1e-9  # of the largest gradient: an array that is zero but for rounding
AGREE = 1e-10  # what the two float64 steps may differ by


def main(chosen):
    """Run the sub-command; returns its exit code."""
    if machine.launched():
        raise UserError("accuracy measures one process: run it without mpirun")
    notes = subject.configure(chosen)
    versions = configuration.versions_of("none")
    torch = importlib.util.find_spec("torch") is not None
    if torch:
        versions["torch"] = configuration.version_of("torch")
    else:
        notes.append("PyTorch is not installed (pip install '.[bench]'): our errors alone")
    for line in notes:
        print(f"warning: {line}")
    found = [_of_seed(chosen, chosen.seed + i, torch) for i in range(chosen.seeds)]
    result = _show(chosen, found)
    machine.write_json(chosen.json, machine.facts(chosen, versions) | result)
    return 0


def _of_seed(chosen, seed, torch):
    """{"ours": errors, "torch": errors, "references": how far the two float64 steps are apart}."""
    net = subject.network(chosen.network, chosen.image, seed)
    images, labels = subject.mini_batch(net.input_shape, chosen.batch_size, seed)
    ours, kept = our_step(net, images, labels)
    decisions = decide(net, images, kept)
    truth = our_truth(net, images, labels, decisions)
    found = {"ours": errors(ours, truth), "zero": zeros(truth)}
    if torch:
        again, _ = torch_step(net, images, labels, decisions, double=True)
        apart = max(e[0] for e in errors(again, truth).values())
        if not apart < AGREE:
            raise Fault(f"the two float64 steps differ by {apart:.1e}: one of them is wrong")
        single, kept = torch_step(net, images, labels)
        its_truth, _ = torch_step(net, images, labels, decide(net, images, kept), double=True)
        found |= {"torch": errors(single, its_truth), "references": apart}
    return found


def zeros(truth):
    """The gradients that are zero but for rounding."""
    sizes = {k: np.abs(v).max() for k, v in truth.items() if "." in k}
    return [k for k, v in sizes.items() if v < NOTHING * max(sizes.values())]


def errors(found, truth):
    """{name: (Euclidean, largest) relative error} of the arrays that are not zero in truth."""
    skipped = zeros(truth)
    result = {}
    for name, array in found.items():
        right = truth[name]
        if name not in skipped:
            wrong = array.astype(np.float64) - right
            result[name] = (
                float(np.linalg.norm(wrong) / np.linalg.norm(right)),
                float(np.abs(wrong).max() / np.abs(right).max()),
            )
    return result


def our_step(net, images, labels):
    """({layer: activation, "layer.name": gradient} of our float32 step, the activations alone).

    Of layers that run as one op the last one's activation is there.
    """
    batch = share(len(images), OneRank())
    activations = {}

    def loss_of(net, x, labels):
        scores = net(x)
        for layer, value in on_the_tape(net, scores):
            activations[layer] = value.local()
        return ops.softmax_cross_entropy(scores, labels)

    x, y = from_images(images, batch), from_images(labels, batch, np.int32)
    _, gradients, _ = value_and_grad(loss_of)(net, x, y)
    gradients = batch.world.gplus(gradients)
    return activations | gradients, activations


def on_the_tape(net, scores):
    """[(layer, its output), ...] as the tape of a network without branches holds them."""
    chain, node = [], scores
    while isinstance(node, Var) and node.parents:
        chain.append(node)
        node = node.parents[0]
    names = [layer.name for layer in net.layers]
    found, at = [], -1
    for node in reversed(chain):
        used = {p.name.rpartition(".")[0] for p in node.parents if isinstance(p, Var)}
        learnt = [names.index(name) for name in used if name in names]
        if learnt:
            at = max(learnt)
        elif node.name == "flatten" and type(net.layers[at + 1]).__name__ != "Flatten":
            continue  # part of a Dense layer
        else:
            at += 1
        if "relu" in node.name and type(net.layers[at]).__name__ == "BatchNorm":
            at += 1  # one op with the layers before
        found.append((names[at], node.value))
    return found


def decide(net, images, activations):
    """{layer: array (n, ...)} of what was decided in a step: of a ReLU where it is positive, of a
    maximum the place of the largest pixel in its window."""
    found, below = {}, images
    for layer in net.layers:
        kind = type(layer).__name__
        if kind == "ReLU":
            found[layer.name] = activations[layer.name] > 0
        elif kind == "MaxPool2D":
            batch = share(len(images), OneRank())
            pools = windows(layer.name, below.shape[1:], layer.size, layer.stride, layer.padding)
            how = pools.size, pools.stride, pools.padding
            _, places = reference.max_pool2d(from_images(below, batch).lanes, *how)
            found[layer.name] = np.moveaxis(places, -1, 1).reshape(-1, *places.shape[1:-1])
            found[layer.name] = found[layer.name][: len(images)]
        below = activations.get(layer.name, below)
    return found


@op(blocks=True)
def decided_relu(x, *, positive):
    """x where it was decided to be positive, else 0."""
    mask = from_images(positive, x.batch, x.dtype).lanes
    return x.like(x.lanes * mask), lambda dy, needs: (x.like(dy.lanes * mask),)


@op(blocks=True)
def decided_max(x, *, places, how):
    """Of each window the pixel at the place that was decided on."""
    chosen = from_images(places, x.batch).lanes
    (rows, columns), (down, across), ((top, bottom), (left, right)) = how
    b, c, h, w, lanes = x.lanes.shape
    p, q = chosen.shape[2:4]
    taps = [(i, j) for i in range(rows) for j in range(columns)]

    def window(array, i, j):
        return array[:, :, i : i + down * (p - 1) + 1 : down, j : j + across * (q - 1) + 1 : across]

    def padded(inner=None):
        array = np.zeros((b, c, h + top + bottom, w + left + right, lanes), x.dtype)
        if inner is not None:
            array[:, :, top : top + h, left : left + w] = inner
        return array

    whole = padded(x.lanes)
    y = sum(np.where(chosen == n, window(whole, i, j), 0) for n, (i, j) in enumerate(taps))

    def vjp(dy, needs):
        dx = padded()
        for n, (i, j) in enumerate(taps):
            window(dx, i, j)[...] += np.where(chosen == n, dy.lanes, 0)
        return (x.like(np.ascontiguousarray(dx[:, :, top : top + h, left : left + w])),)

    return x.like(y), vjp


def our_truth(net, images, labels, decisions):
    """{layer: activation, "layer.name": gradient} in float64, by the NumPy reference."""
    exact = Network(net.layers, net.input_shape)
    exact.parameters = {k: v.astype(np.float64) for k, v in net.parameters.items()}
    batch = share(len(images), OneRank())
    activations = {}

    def loss_of(bound, x, labels):
        for layer in bound.layers:
            kind = type(layer).__name__
            if kind == "ReLU":
                x = decided_relu(x, positive=decisions[layer.name])
            elif kind == "MaxPool2D":
                *how, _ = windows("", x.shape[1:], layer.size, layer.stride, layer.padding)
                x = decided_max(x, places=decisions[layer.name], how=how)
            else:
                context = LayerContext(layer, bound.parameters, bound.state, True, "global")
                x = layer.forward(x, context)
            value = x.value if isinstance(x, Var) else x
            activations[layer.name] = value.local()
        return ops.softmax_cross_entropy(x, labels)

    x = from_images(images, batch, np.float64)
    y = from_images(labels, batch, np.int32)
    _, gradients, _ = value_and_grad(loss_of)(exact, x, y)
    return activations | batch.world.gplus(gradients)


def torch_step(net, images, labels, decisions=None, double=False):
    """The same by PyTorch, with decisions of another step or its own; and the activations alone."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    model = modules.module(net, inplace=False).train()
    x, labels = torch.from_numpy(images), torch.from_numpy(labels)
    if double:
        model, x = model.double(), x.double()
    activations = {}
    for layer, part in zip(net.layers, model.parts, strict=True):
        name = layer.name
        if decisions is None or name not in decisions:
            x = part(x)
        elif isinstance(part, torch.nn.ReLU):
            x = x * torch.from_numpy(decisions[name])
        else:
            x = _largest(layer, x, decisions[name])
        activations[name] = x.detach().numpy().copy()
    cross_entropy(x, labels).backward()
    gradients = {name: value.grad.numpy() for name, value in modules.learnables(model)}
    return activations | gradients, activations


def _largest(pool, x, places):
    """Of each window of a MaxPool2D layer the pixel at its place."""
    import torch
    from torch.nn.functional import pad

    how = windows(pool.name, tuple(x.shape[1:]), pool.size, pool.stride, pool.padding)
    (_, columns), (down, across), ((top, bottom), (left, right)), _ = how
    x = pad(x, (left, right, top, bottom))
    places = torch.from_numpy(places.astype(np.int64))
    p, q = places.shape[2:]
    row = torch.arange(p)[:, None] * down + places // columns
    column = torch.arange(q) * across + places % columns
    flat = (row * x.shape[3] + column).flatten(2)
    return x.flatten(2).gather(2, flat).reshape(places.shape)


def _show(chosen, found):
    """Print the table; returns the result: medians over the seeds."""
    sides = [side for side in ("ours", "torch") if side in found[0]]

    def medians(side, which):
        names = found[0]["ours"]
        return {n: machine.median([f[side][n][which] for f in found]) for n in names}

    norm = {side: medians(side, 0) for side in sides}
    largest = {side: medians(side, 1) for side in sides}
    print(
        f"{chosen.network}, batch {chosen.batch_size}, {machine.arithmetic()}, winograd "
        f"{chosen.winograd}, medians of {len(found)} seed(s)"
    )
    if "references" in found[0]:
        apart = max(f["references"] for f in found)
        print(f"the two float64 steps agree to {apart:.1e}")
    print(f"{'':16}{'|a - b| / |b|':^34}{'largest':^34}")
    titles = f"{'ours':>10}{'PyTorch':>12}{'ratio':>8}{'':4}"
    print(f"{'':16}{titles}{titles}")
    ratios = {}
    for name in norm["ours"]:
        cells = ""
        for table in (norm, largest):
            cells += f"{table['ours'][name]:10.1e}"
            if "torch" in table:
                ratio = table["ours"][name] / max(table["torch"][name], 1e-300)
                ratios.setdefault(name, []).append(ratio)
                cells += f"{table['torch'][name]:12.1e}{ratio:8.2f}{'':4}"
        print(f"{name:16}{cells}")
    gradients = {k: v for k, v in ratios.items() if "." in k}
    if gradients:
        worst = max(gradients, key=lambda k: gradients[k][0])
        print(f"largest ratio of a gradient: {gradients[worst][0]:.2f} ({worst})")
    result = {
        "network": chosen.network,
        "batch_size": chosen.batch_size,
        "seeds": len(found),
        "winograd": chosen.winograd,
        "measure": "error: Euclidean norm of the difference over that of the float64 array; "
        "max_error: largest difference over the largest element",
        "zero_gradients": found[0]["zero"],
        "error": norm["ours"],
        "max_error": largest["ours"],
    }
    if "torch" in norm:
        result |= {
            "references_agree": apart,
            "torch_error": norm["torch"],
            "torch_max_error": largest["torch"],
            "ratio": {k: v[0] for k, v in ratios.items()},
            "max_ratio": {k: v[1] for k, v in ratios.items()},
            "worst_gradient_ratio": max(v[0] for v in gradients.values()),
        }
    return result
