"""The cases of `backends.training_interface` in the table: losses, optimizers and images."""

import types

import numpy as np
from conformance import Case, Draw, cotangent, filters, images, labels, lanes, vector

from mpidl.backends.reference import optimizer as reference
from mpidl.backends.training_interface import BinaryRule, LabelRule, OverlapRule

CPU = ("cpu",)

# ---- loss: (classes, pixels) ----


def label_rules(classes, pixels, label, scores, large):
    """Yield cases with labels outside the classes, class weights, smoothing and focal loss."""
    weights, labels = np.linspace(0, 2, classes), Draw("lanes", pixels, -1, classes + 2, np.int32)
    rules = {
        "other labels": LabelRule(),
        "weighted and smoothed": LabelRule(weights, 0.3),
        "weighted and focal": LabelRule(weights, 0.0, 2.0),
        "focal 0.5": LabelRule(None, 0.0, 0.5),
    }
    for name, rule in rules.items():
        of_rule = f"{label}, {name}"
        arguments = {"logits": scores, "labels": labels, "rule": rule}
        yield Case("cross_entropy", of_rule, arguments, 1e-13, True)
        scaled = arguments | {"scale": 0.37}
        yield Case("cross_entropy_dlogits", of_rule, scaled, 1e-6, True, **large)
        label_arguments = {"labels": labels, "rule": rule, "classes": classes}
        yield Case("label_weight", of_rule, label_arguments, 1e-13, True)


def binary_losses(classes, pixels, label, scores, large):
    """Yield cases with integer targets, some of them neither 0 nor 1, and with float targets."""
    shape, weights = (classes, *pixels), np.linspace(0.5, 3, classes)
    targets = {
        "ints": Draw("lanes", shape, -1, 4, np.int32),
        "fractions": Draw("lanes", shape, 0, 1),
    }
    rules = {"": BinaryRule(), ", weighted and focal": BinaryRule(weights, 1.5)}
    for kind, target in targets.items():
        compared = {"logits": scores, "targets": target}
        yield Case("binary_correct_count", f"{label}, {kind}", compared, 0)
        for name, rule in rules.items():
            call = f"{label}, {kind}{name}", compared | {"rule": rule}
            yield Case("binary_cross_entropy", *call, 1e-13, True)
            scaled = call[1] | {"scale": 0.37}
            yield Case("binary_cross_entropy_dlogits", call[0], scaled, 2**-23, True, **large)


def soft_losses(label, scores, shape, large):
    """Yield cases with target probabilities, whose sum is not 1, with and without smoothing."""
    compared = {"logits": scores, "targets": Draw("lanes", shape, 0, 1)}
    yield Case("soft_correct_count", label, compared, 1e-13, True)
    for name, options in {label: {}, f"{label}, smoothed": {"smoothing": 0.3}}.items():
        yield Case("soft_cross_entropy", name, compared | options, 1e-13, True)
        scaled = compared | options | {"scale": 0.37}
        yield Case("soft_cross_entropy_dlogits", name, scaled, 1e-6, **large)


def overlap_losses(classes, pixels, label, large):
    """Yield cases with labels outside the classes, for each rule."""
    p = Draw("lanes", (classes, *pixels), 0, 1, np.float64)
    arguments = {"p": p, "labels": Draw("lanes", pixels, -1, classes + 2, np.int32)}

    def loss(backend, a):
        return backend.overlap(a["p"], a["labels"], a["counts"], a["tree"], a["rule"])[0]

    def gradient(backend, a):
        _, slopes = backend.overlap(a["p"], a["labels"], a["counts"], a["tree"], a["rule"])
        d = backend.overlap_dp(a["p"], a["labels"], slopes, 0.37, a["counts"], a["rule"])
        return d.astype(np.float32) if isinstance(d, np.ndarray) else d  # reference: float64

    weights = np.linspace(0.5, 2, classes)
    for name, rule in {
        "plain": OverlapRule(),
        "weighted, not smoothed": OverlapRule(weights, 0.0),
        "generalized": OverlapRule(weights, 0.5, True),
        "of errors": OverlapRule(
            weights, 0.5, is_squared=False, below=-0.4, chances=0.6, labelled=1.8
        ),
    }.items():
        call = f"{label}, {name}", arguments | {"rule": rule}
        yield Case("overlap", *call, 1e-13, True, call=loss)
        yield Case("overlap_dp", *call, call=gradient, **large)


def reciprocal(backend, arguments):
    """Call `reciprocal` with a sum over all ranks, in the form that `World.gplus` returns."""
    total = arguments["total"]
    if isinstance(total, np.ndarray):
        return np.array([backend.reciprocal(total[0])])
    return backend.reciprocal(types.SimpleNamespace(roots=[total])).array


SCORES = [(10, ()), (1, ()), (2, ()), (33, ()), (1000, ()), (4, (1, 1)), (3, (2, 3)), (40, (3, 5))]
SCORES += [(2, (3, 87))]  # an image is split into two leaves of different sizes


def losses(classes, pixels):
    label = f"{classes} classes" + (f", {pixels}" if pixels else "")
    scores = Draw("lanes", (classes, *pixels), -8, 8)
    large = {"numbers_only": pixels == (3, 87)}  # for cases of functions without sums
    labelled = {"logits": scores, "labels": labels(classes, *pixels)}
    yield Case("softmax", label, {"logits": scores}, 1e-14, True, **large)
    yield Case(
        *("softmax_dx", label, {"logits": scores, "dy": cotangent(classes, *pixels)}, 3e-7),
        call=lambda b, a: b.softmax_dx(a["dy"], b.softmax(a["logits"])),
        **large,
    )
    yield Case("cross_entropy", label, labelled, 1e-13, True)
    yield Case("correct_count", label, labelled, 0)
    yield Case("cross_entropy_dlogits", label, labelled | {"scale": 0.37}, 2**-23, True, **large)
    if (classes, pixels) in ((10, ()), (33, ()), (4, (1, 1)), (3, (2, 3)), (2, (3, 87))):
        yield from soft_losses(label, scores, (classes, *pixels), large)
    if (classes, pixels) in ((33, ()), (3, (2, 3)), (2, (3, 87))):
        yield from label_rules(classes, pixels, label, scores, large)
    if (classes, pixels) in ((1, ()), (33, ()), (3, (2, 3))):
        yield from binary_losses(classes, pixels, label, scores, large)
    if (classes, pixels) in ((1, ()), (3, (2, 3)), (2, (3, 87))):
        yield from overlap_losses(classes, pixels, label, large)
    compared = {"y": scores, "target": scores}
    for power in (1, 2):
        name = f"{label}, power {power}"
        yield Case("errors", name, compared | {"power": power}, 1e-13, True)
        yield Case(
            "errors_dy", name, compared | {"power": power, "scale": 0.37}, 2**-23, True, **large
        )


# ---- optimizer ----

LEARNABLES = [
    *(vector(5), filters(4, 3, 3, 2), vector(), filters(7, 12, image=(3, 2, 2)), vector(1025)),
    *(vector(64), filters(3, 2, 4, 4), vector(0), vector(2050)),
]
DECAYS = [0, 1e-4, 0.5, 1e-4, 0, 1e-4, 0.1, 0, 0]
FACTORS = [1, 2, 0.5, 1, 1, 20, 1, 1, 0.1]
# Sizes around the tile size of the C kernels. These kernels convert gradients of other dtypes.
LARGE_LEARNABLES = [vector(17), vector(3, 5), vector(128, 128), vector(16385), vector(0, 4)]
LARGE_LEARNABLES += [vector(1), vector(50_001), vector(), vector(64)]
LARGE_GRADIENTS = [draw._replace(dtype=np.float64) for draw in LARGE_LEARNABLES[:1]]
LARGE_GRADIENTS += LARGE_LEARNABLES[1:]

ADAM = (0.01, 0.9, 1 - 0.9, 0.999, 1 - 0.999, 1e-8)
FORMULAS = {  # {formula: (numbers, lowest value of each state array)}
    "sgdm": ((0.1, 0.9), [-1.0]),
    "nesterov": ((0.1, 0.9), [-1.0]),
    "adam": (ADAM, [-1.0, 0.0]),
    "adamw": ((*ADAM, 0.3), [-1.0, 0.0]),
    "rmsprop": ((0.01, 0.999, 1 - 0.999, 1e-8), [0.0]),
    "average": ((0.3,), [-1.0]),
}


def step(formula, label, learnables, gradients, backends=("cpu", "gpu")):
    """Return a case of an optimizer step. New weights and state must have equal bits."""
    (rate, *constants), lows = FORMULAS[formula]
    lists = {"weights": learnables, "gradients": gradients}
    names = [f"state {i}" for i in range(len(lows))]
    for name, low in zip(names, lows, strict=True):
        lists[name] = [draw._replace(low=low) for draw in learnables]

    def call(backend, a):
        state = [a[name] for name in names]
        numbers = [backend.step_number("learning_rate", rate), *constants]
        lists = a["weights"], a["gradients"], state
        return [backend.optimizer_step(formula, *lists, numbers, DECAYS, FACTORS), state]

    return Case("optimizer_step", label, lists, 0, call=call, backends=backends)


def clipped(method, threshold):
    """Yield cases of clipping. Results have equal bits, except for norms on a GPU.

    A GPU sums in another order.
    """
    arguments = {"weights": LEARNABLES, "gradients": LEARNABLES}
    options = {"decays": DECAYS, "method": method, "threshold": threshold}
    tolerance = 0 if method == "absolute-value" or threshold == 1e6 else 2e-7
    yield Case("clip", f"{method}, {threshold}", arguments | options, tolerance)
    arguments = {"weights": LARGE_LEARNABLES, "gradients": LARGE_GRADIENTS} | options
    yield Case("clip", f"{method}, {threshold}, large", arguments, 0, backends=CPU)


COEFFICIENTS = [0, 0.001, 0.5, 1, 1, 0, 2, 1, 1]


def trust(method):
    """Yield cases of trust ratios. Results have equal bits, except on a GPU.

    A GPU sums in another order.
    """
    zero = [vector(5, low=0, high=0), *LEARNABLES[1:4]]  # the ratio is 1 if the norm is 0
    options = {"decays": DECAYS, "coefficients": COEFFICIENTS, "method": method}
    arguments = {"weights": LEARNABLES, "updates": LEARNABLES} | options
    yield Case("trust", method, arguments, 2e-7)
    few = {"decays": [0, *DECAYS[1:4]], "coefficients": [1, *COEFFICIENTS[1:4]], "method": method}
    yield Case("trust", f"{method}, zero weights", {"weights": zero, "updates": zero} | few, 2e-7)
    # the update is zero but the weights are not, and the other way round
    for name, pair in {
        "updates": (LEARNABLES[:4], zero),
        "weights": (zero, LEARNABLES[:4]),
    }.items():
        arguments = dict(zip(("weights", "updates"), pair, strict=True)) | few
        decaying = arguments | {"decays": [0.5, *DECAYS[1:4]]}
        yield Case("trust", f"{method}, decay, only {name} are zero", decaying, 2e-7)
    arguments = {"weights": LARGE_LEARNABLES, "updates": LARGE_GRADIENTS} | options
    yield Case("trust", f"{method}, large", arguments, 0, backends=CPU)


# ---- images ----

PIXELS = [(3, 5, 7), (1, 28, 28), (1, 1, 1), (4, 2, 33), (2, 19, 31)]
LARGE_PIXELS = [(3, 32, 32), (2, 3, 16), (1, 2, 17)]


def pixels_to_lanes(shape):
    """Yield cases of `images`: mirror, shift, crop, fill and scale. Results have equal bits."""
    c, h, w = shape
    moves = {
        "mirrored": images(low=0, high=4, dtype=np.int32),
        "top": images(low=-h - 2, high=h + 3, dtype=np.int32),
        "left": images(low=-w - 2, high=w + 3, dtype=np.int32),
    }
    yield Case("images", f"{shape}", {"pixels": images(*shape)}, 0)
    floats = images(*shape, dtype=np.float32)
    yield Case("images", f"{shape}, float32", {"pixels": floats}, 0)
    for size in {(h, w): 0, (max(1, h - 3), max(1, w // 2)): 0, (h + 2, w + 9): 0}:
        arguments = {"pixels": images(*shape), "size": size} | moves
        yield Case("images", f"{shape} to {size}", arguments, 0)
    for name, values in moves.items():
        arguments = {"pixels": images(*shape), "size": (h + 2, max(1, w // 2)), name: values}
        yield Case("images", f"{shape}, {name}", arguments, 0)
    for scaled in ((c,), (c, h, w)):
        for pixels in (images(*shape), floats):
            kind = np.dtype(pixels.dtype).name
            arguments = {"pixels": pixels, "size": (h, w)} | moves
            arguments |= {"fill": vector(c, low=0, high=255, dtype=pixels.dtype)}
            arguments |= {name: vector(*scaled, low=1, high=200) for name in ("centre", "divisor")}
            yield Case("images", f"{shape} {kind}, normalized by {scaled}", arguments, 0)


def planes(stride, width):
    """Return a case with rows of a decoder, which may have gaps between them."""
    rows = vector(7, width + 3, stride, low=0, high=256, dtype=np.uint8)
    return Case(
        *("planes", f"rows of {width} pixels of {stride} bytes", {"pixels": rows}, 0),
        call=lambda backend, a: backend.planes(a["pixels"][:, :width]),
        backends=CPU,
    )


def training_table():
    for classes, pixels in SCORES:
        yield from losses(classes, pixels)
    for name, low, high in (("positive", 1, 9), ("zero", 0, 0)):
        total = {"total": Draw("plain", (1,), low, high, np.float64)}
        yield Case("reciprocal", name, total, 0, call=reciprocal)
    for formula in reference.FORMULAS:
        yield step(formula, formula, LEARNABLES, LEARNABLES)
        large = f"{formula}, large"
        yield step(formula, large, LARGE_LEARNABLES, LARGE_GRADIENTS, backends=CPU)
    for method in ("l2norm", "global-l2norm", "absolute-value"):
        for threshold in (0.25, 10.0, 100.0, 1e6):  # some norms are below 10 and 100, some above
            yield from clipped(method, threshold)
    for method in reference.TRUST_METHODS:
        yield from trust(method)
    yield Case("zeros_like", "dense weights", {"x": filters(7, 12, image=(3, 2, 2))}, 0)
    yield Case(
        *("from_numpy", "dense weights", {"like": filters(7, 12, image=(3, 2, 2))}, 0),
        call=lambda b, a: b.from_numpy(np.arange(84.0).reshape(7, 12), a["like"]),
    )
    for shape in PIXELS:
        yield from pixels_to_lanes(shape)
    for shape in LARGE_PIXELS:
        yield from (case._replace(backends=CPU) for case in pixels_to_lanes(shape))
    for shape in ((3, 4, 5), (7,)):
        yield Case("image_sums", f"{shape}", {"x": lanes(*shape)}, 1e-6, backends=CPU)
    for turn in (0, 1, 2, 3):
        arguments = {"x": lanes(3, 5, 7), "turn": turn}
        yield Case("mirror", f"turn {turn}", arguments, 0)
        arguments |= {"total": lanes(3, 5, 7), "factor": 0.3}
        yield Case("mirror", f"turn {turn}, added", arguments, 0)
    yield Case("mirror", "scores", {"x": lanes(10), "turn": 0, "total": lanes(10)}, 0)
    for stride in (1, 3, 4):
        for width in (1, 5, 227):
            yield planes(stride, width)
    maps = images(6, low=-2, high=2, dtype=np.float64)
    for dtype in (np.uint8, np.float32):
        arguments = {"pixels": images(3, 7, 9, dtype=dtype), "maps": maps, "size": (5, 6)}
        arguments["fill"] = vector(3, low=0, high=255, dtype=dtype)
        yield Case("warp", np.dtype(dtype).name, arguments, 0, backends=CPU)
    words = {"seed": 3, "purpose": "shuffle", "count": 5, "epoch": 2, "samples": Draw("samples")}
    yield Case("keyed_words", "five each", words, 0, backends=CPU)
