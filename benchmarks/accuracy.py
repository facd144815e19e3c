"""`python -m benchmarks accuracy`: measure the errors of each layer's activations and gradients.

The exact values come from the same training step in float64. Both mpidl's NumPy reference and
PyTorch, which share no code, compute this step. Rounding may change the sign at a ReLU or the
position of the largest pixel in a pooling window. In any library, the gradients of earlier layers
would then differ by 1e-3, although the sums are precise. Each float64 step therefore reuses the
decisions of the float32 step that it is compared with: which activations were positive, and which
pixel of each window was the largest.

Errors are relative: |a - b| / |b| in the Euclidean norm, and the largest |a - b| divided by the
largest |b|. Arrays whose exact value is zero have no relative error and are omitted. An example is
the gradient of a bias before a batch normalization.

With `--precision bf16`, no decisions are reused, because the signs that rounding to bfloat16
changes are most of its error. The errors are those of the gradients alone, and "all gradients" is
the error of all of them as one vector. PyTorch runs under autocast, in the layout channels_last.
"""

import argparse
import copy

import numpy as np

from benchmarks import machine, mpidl_step, report, subject, torch_step
from mpidl import ops
from mpidl.backends import REFERENCE as reference
from mpidl.core.blocks import OneRank, from_images, share
from mpidl.core.grad import value_and_grad
from mpidl.core.op import op
from mpidl.core.tape import Var, value_of
from mpidl.errors import Fault, UserError
from mpidl.nn import Network
from mpidl.nn.layers import LayerContext
from mpidl.text import pip_install
from mpidl.training.options import configuration

ZERO = 1e-9  # gradients below this fraction of the largest gradient hold only rounding errors
AGREE = 1e-10  # largest allowed difference between the two float64 steps
CHAOTIC = 0.8  # PyTorch's error from which on a ratio of the errors says little
ALL = "all gradients"  # name of the error of all gradients as one vector


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file."""
    machine.refuse_launcher("accuracy")
    notes = subject.configure(options)
    versions = configuration.versions_of("none")
    torch = torch_step.is_installed()
    if torch:
        versions["torch"] = configuration.version_of("torch")
    else:
        notes.append(
            f"PyTorch is not installed ({pip_install('bench')}): measuring only mpidl's errors"
        )
    subject.print_head(
        options,
        f"{machine.arithmetic()}, winograd {options.winograd}, medians of {options.seeds} seed(s)",
        notes,
    )
    by_seed = [_measure_seed(options, options.seed + i, torch) for i in range(options.seeds)]
    figures = _summarize(by_seed)
    names = "network", "image", "batch_size", "seeds", "precision", "winograd"
    return report.header(options, versions, *names) | figures


def _measure_seed(options, seed, torch):
    """Measure the errors for one seed.

    In the result, "ours" and "torch" map names of arrays to errors, and "zero" lists the omitted
    gradients. "references" is the difference between the two float64 steps.
    """
    net = subject.network(options.network, options.image, seed, dropout=False)
    if options.precision == "bf16":
        batch = subject.mini_batch(net.input_shape, options.batch_size, seed)
        return _measure_gradients(net, *batch, torch)
    if any(len(names) > 1 for names in net.reads):
        raise UserError(f"--network {options.network}: expected a network without branches")
    images, labels = subject.mini_batch(net.input_shape, options.batch_size, seed)
    ours, activations = our_step(net, images, labels)
    decisions = decide(net, images, activations)
    exact = exact_step(net, images, labels, decisions)
    record = {"ours": errors(ours, exact), "zero": zero_gradients(exact)}
    if torch:
        double, _ = run_torch(net, images, labels, decisions, double=True)
        difference = max(norm for norm, _ in errors(double, exact).values())
        if not difference < AGREE:
            raise Fault(f"the two float64 steps differ by {difference:.1e}: one of them is wrong")
        single, activations = run_torch(net, images, labels)
        decisions = decide(net, images, activations)
        double, _ = run_torch(net, images, labels, decisions, double=True)
        record |= {"torch": errors(single, double), "references": difference}
    return record


def _measure_gradients(net, images, labels, torch):
    """Measure the errors of the gradients if each side makes its own decisions."""
    if torch:
        exact = torch_gradients(net, images, labels, "fp64")
    else:
        double = copy.copy(net)
        double.parameters = {k: v.astype(np.float64) for k, v in net.parameters.items()}
        exact = our_gradients(double, images.astype(np.float64), labels)
    sides = {"ours": our_gradients(net, images, labels)}
    if torch:
        sides["torch"] = torch_gradients(net, images, labels, "bf16")
    by_side = {side: gradient_errors(gradients, exact) for side, gradients in sides.items()}
    return by_side | {"zero": zero_gradients(exact)}


def gradient_errors(gradients, exact):
    """Return `errors` of gradients, after the error of all of them as one vector."""
    pairs = errors(gradients, exact)
    vectors = [
        np.concatenate([arrays[name].ravel() for name in pairs]) for arrays in (gradients, exact)
    ]
    return errors(*({ALL: vector} for vector in vectors)) | pairs


def zero_gradients(exact):
    """Return the names of the gradients that hold only rounding errors."""
    sizes = {k: np.abs(v).max() for k, v in exact.items() if "." in k}
    return [k for k, v in sizes.items() if v < ZERO * max(sizes.values())]


def errors(arrays, exact):
    """Return {name: (Euclidean, largest) relative error}, except for gradients that are zero."""
    skipped = zero_gradients(exact)
    pairs = {}
    for name, array in arrays.items():
        expected = exact[name]
        if name not in skipped:
            difference = array.astype(np.float64) - expected
            pairs[name] = (
                float(np.linalg.norm(difference) / np.linalg.norm(expected)),
                float(np.abs(difference).max() / np.abs(expected).max()),
            )
    return pairs


def our_step(net, images, labels):
    """Run our float32 step.

    Returns
    -------
    dict, dict
        The first dict maps layers to activations and "layer.name" to gradients. The second dict has
        only the activations. If several layers run as one op, only the last of these layers has an
        activation.
    """
    activations = {}

    def loss_of(net, x, labels):
        scores = net(x)
        for layer, value in outputs_on_tape(net, scores):
            activations[layer] = value.local()
        return ops.softmax_cross_entropy(scores, labels)

    return activations | our_gradients(net, images, labels, loss_of), activations


def our_gradients(net, images, labels, loss_of=mpidl_step.mean_loss):
    """Return our gradients by name."""
    batch = share(len(images), OneRank())
    x, y = from_images(images, batch), from_images(labels, batch, np.int32)
    _, gradients, _ = value_and_grad(loss_of)(net, x, y)
    return batch.world.gplus(gradients)


def outputs_on_tape(net, scores):
    """Return pairs (layer name, output) for the ops on the tape of a network without branches."""
    chain, node = [], scores
    while isinstance(node, Var) and node.parents:
        chain.append(node)
        node = node.parents[0]
    names = [layer.name for layer in net.layers]
    outputs, position = [], -1
    for node in reversed(chain):
        owners = {p.name.rpartition(".")[0] for p in node.parents if isinstance(p, Var)}
        positions = [names.index(name) for name in owners if name in names]
        if positions:
            position = max(positions)
        elif node.name == "flatten" and type(net.layers[position + 1]).__name__ != "Flatten":
            continue  # part of a Dense layer
        else:
            position += 1
        if node.name in ("conv2d_batchnorm", "conv2d_relu"):
            position += 1  # the op ends with the ReLU that follows its learnables
        outputs.append((names[position], node.value))
    return outputs


def decide(net, images, activations):
    """Return the decisions of a step as arrays (n, ...) by layer name.

    The array of a ReLU says whether each activation is positive. The array of a max pooling layer
    gives the position of the largest pixel in each window.
    """
    decisions, x = {}, images
    for layer in net.layers:
        kind = type(layer).__name__
        if kind == "ReLU":
            decisions[layer.name] = activations[layer.name] > 0
        elif kind == "MaxPool2D":
            batch = share(len(images), OneRank())
            args = subject.pool_windows(layer, x.shape[1:])
            _, positions = reference.max_pool2d(from_images(x, batch).lanes, args)
            images_first = np.moveaxis(positions, -1, 1).reshape(-1, *positions.shape[1:-1])
            decisions[layer.name] = images_first[: len(images)]
        x = activations.get(layer.name, x)
    return decisions


@op(blocks=True)
def decided_relu(x, *, positive):
    """Return x where `positive` is True, and 0 elsewhere."""
    mask = from_images(positive, x.batch, x.dtype).lanes
    return x.like(x.lanes * mask), lambda dy, needs: (x.like(dy.lanes * mask),)


@op(blocks=True)
def decided_max(x, *, positions, args):
    """Pick the pixel at the given position of each window; `args` is (sizes, strides, pads)."""
    lanes_at = from_images(positions, x.batch).lanes
    (rows, columns), (down, across), ((top, bottom), (left, right)) = args
    b, c, h, w, lanes = x.lanes.shape
    p, q = lanes_at.shape[2:4]
    taps = [(i, j) for i in range(rows) for j in range(columns)]

    def window(array, i, j):
        return array[:, :, i : i + down * (p - 1) + 1 : down, j : j + across * (q - 1) + 1 : across]

    def padded(inner=None):
        array = np.zeros((b, c, h + top + bottom, w + left + right, lanes), x.dtype)
        if inner is not None:
            array[:, :, top : top + h, left : left + w] = inner
        return array

    pixels = padded(x.lanes)
    y = sum(np.where(lanes_at == n, window(pixels, i, j), 0) for n, (i, j) in enumerate(taps))

    def vjp(dy, needs):
        dx = padded()
        for n, (i, j) in enumerate(taps):
            window(dx, i, j)[...] += np.where(lanes_at == n, dy.lanes, 0)
        return (x.like(np.ascontiguousarray(dx[:, :, top : top + h, left : left + w])),)

    return x.like(y), vjp


def exact_step(net, images, labels, decisions):
    """Run the step in float64 with the NumPy reference. Return the first result of `our_step`."""
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
                args = subject.pool_windows(layer, x.shape[1:])
                x = decided_max(x, positions=decisions[layer.name], args=args)
            else:
                x = layer.forward(
                    x, LayerContext(layer, bound.parameters, bound.state, True, "global")
                )
            value = value_of(x)
            activations[layer.name] = value.local()
        return ops.softmax_cross_entropy(x, labels)

    x = from_images(images, batch, np.float64)
    y = from_images(labels, batch, np.int32)
    _, gradients, _ = value_and_grad(loss_of)(exact, x, y)
    return activations | batch.world.gplus(gradients)


def torch_gradients(net, images, labels, precision):
    """Return PyTorch's gradients by name; `precision` is "fp64" or "bf16"."""
    import torch

    torch.set_num_threads(1)
    variant = "eager" if precision == "fp64" else "channels_last"
    step = torch_step.TorchStep(net, images, labels, variant, precision=precision)
    step()
    return {name: value.grad.numpy() for name, value in torch_step.named_learnables(step.module)}


def run_torch(net, images, labels, decisions=None, double=False):
    """Run PyTorch's step and return the same two dicts as `our_step`.

    If `decisions` is None, PyTorch makes the decisions itself.
    """
    import torch

    torch.set_num_threads(1)
    model = torch_step.build_module(net, inplace=False).train()
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
            x = _pixels_at(layer, x, decisions[name])
        activations[name] = x.detach().numpy().copy()
    torch_step.cross_entropy(x, labels).backward()
    pairs = torch_step.named_learnables(model)
    return activations | {name: value.grad.numpy() for name, value in pairs}, activations


def _pixels_at(pool, x, positions):
    """Pick the pixel at the given position of each window of a MaxPool2D layer."""
    import torch
    from torch.nn.functional import pad

    args = subject.pool_windows(pool, x.shape[1:])
    (_, columns), (down, across), ((top, bottom), (left, right)) = args
    x = pad(x, (left, right, top, bottom))
    positions = torch.from_numpy(positions.astype(np.int64))
    p, q = positions.shape[2:]
    row = torch.arange(p)[:, None] * down + positions // columns
    column = torch.arange(q) * across + positions % columns
    flat = (row * x.shape[3] + column).flatten(2)
    return x.flatten(2).gather(2, flat).reshape(positions.shape)


def _summarize(by_seed):
    """Print the table of medians over the seeds; return the same figures for the JSON file."""
    names = by_seed[0]["ours"]
    sides = [side for side in ("ours", "torch") if side in by_seed[0]]

    def medians(side, i):
        return {name: report.median([seed[side][name][i] for seed in by_seed]) for name in names}

    norm, largest = ({side: medians(side, i) for side in sides} for i in (0, 1))
    ratio, max_ratio = (
        {n: table["ours"][n] / max(table["torch"][n], 1e-300) for n in names if "torch" in table}
        for table in (norm, largest)
    )
    rows = [["|a - b| / |b|, then max:", *("ours", "PyTorch", "ratio")[: 2 * len(sides) - 1] * 2]]
    for name in names:
        rows.append([name])
        for table, ratios in ((norm, ratio), (largest, max_ratio)):
            rows[-1] += [f"{table[side][name]:.1e}" for side in sides]
            rows[-1] += [f"{ratios[name]:.2f}"] if ratios else []
    report.print_table(rows)
    figures = {
        "measure": "error: Euclidean norm of the difference over the norm of the float64 array; "
        "max_error: largest difference over the largest element",
        "zero_gradients": by_seed[0]["zero"],
        "error": norm["ours"],
        "max_error": largest["ours"],
    }
    if not ratio:
        return figures
    worst = max((name for name in names if "." in name), key=ratio.get)
    if ALL in names:
        figures |= _summarize_all(by_seed)
    else:
        figures["references_agree"] = max(seed["references"] for seed in by_seed)
        print(f"the two float64 steps agree to {figures['references_agree']:.1e}")
    print(f"largest ratio among gradients: {ratio[worst]:.2f} ({worst})")
    return figures | {
        "torch_error": norm["torch"],
        "torch_max_error": largest["torch"],
        "ratio": ratio,
        "max_ratio": max_ratio,
        "worst_gradient_ratio": ratio[worst],
    }


def _summarize_all(by_seed):
    """Print the ratio of the errors of all gradients; return its entries for the JSON file."""
    our_errors, torch_errors = (
        [seed[side][ALL][0] for seed in by_seed] for side in ("ours", "torch")
    )
    ratios = [a / b for a, b in zip(our_errors, torch_errors, strict=True)]
    print(f"{ALL}: ratio {report.spread(ratios)} of {len(ratios)} seed(s)")
    torch_error = report.median(torch_errors)
    if torch_error > CHAOTIC:
        print(
            f"warning: PyTorch's error is {torch_error:.2f}: in bfloat16, the gradients of this "
            "network are hardly related to the exact ones, so the ratio is near 1"
        )
    return {"all_ratio": report.median(ratios), "all_ratios": report.summary(ratios)}
