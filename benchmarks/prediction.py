"""Define a prediction pass over a mini-batch in memory for each library.

The images are an array (N, C, H, W), and the result is an array of scores (N, K) before softmax.
The time of a pass includes all conversions between these arrays and the library's own layout. Only
PyTorch's variants "channels_last" convert the images in advance.
"""

import tempfile
from collections.abc import Callable

import numpy as np

from benchmarks import torch_step, turns
from mpidl.backends import fast_convolutions
from mpidl.core.blocks import from_images, share
from mpidl.interchange.onnx_export import save_onnx
from mpidl.nn import Network, inference
from mpidl.ranks.world import World


def mean_loss(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean cross-entropy of scores (N, K), in float64."""
    scores = scores.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    logarithms = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return float(-logarithms[np.arange(len(labels)), labels].mean())


def serve(
    address: str,
    scores: Callable[[], np.ndarray],
    labels: np.ndarray,
    *actions: Callable,
) -> None:
    """Serve the requests of a `turns.Side`: each step is one prediction.

    `actions` handle further requests; see `turns.serve`.
    """

    def losses(count):
        return [mean_loss(scores(), labels)]

    def steps(count):
        return turns.timed_steps(scores, count)

    turns.serve(address, 0, *actions, losses, steps)


def our_pass(net: Network, images: np.ndarray, world: World) -> Callable[[], np.ndarray]:
    """Return a function that computes the scores of this rank's images as `dl.predict` does."""
    net = inference.fold_batchnorm(net)
    batch = share(len(images), world)
    part = images[slice(*batch.images)]

    def scores():
        with fast_convolutions():
            return net.logits(from_images(part, batch)).local()

    return scores


def torch_pass(
    net: Network, images: np.ndarray, variant: str, precision: str = "fp32"
) -> Callable[[], np.ndarray]:
    """Return a function that computes the scores with PyTorch.

    For `variant`, see `torch_step.TorchStep`. A compiled model is frozen: the compiler folds
    batch normalization into the weights and lays out the weights for its kernels. With the
    precision "bf16", the model's weights are bfloat16, which is faster than autocast.
    """
    import torch

    words, dtype = variant.split("+"), torch.bfloat16 if precision == "bf16" else torch.float32
    model = torch_step.build_module(net).eval().to(dtype)
    pixels = torch.from_numpy(images)
    if "channels_last" in words:
        model = model.to(memory_format=torch.channels_last)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    if "compile" in words:
        import torch._inductor.config

        torch._inductor.config.freezing = True
        model = torch.compile(model)

    def scores():
        no_gradients = torch.inference_mode() if "compile" not in words else torch.no_grad()
        with no_gradients:
            return model(pixels.to(dtype)).float().numpy()

    return scores


def onnx_pass(net: Network, images: np.ndarray, threads: int) -> Callable[[], np.ndarray]:
    """Return a function that computes the scores with onnxruntime, from the exported network."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        save_onnx(net, file.name, normalize_images=False)
        session = onnxruntime.InferenceSession(
            file.name, options, providers=["CPUExecutionProvider"]
        )
    (image_input,) = session.get_inputs()
    return lambda: session.run(None, {image_input.name: images})[0]
