"""Train a network of the zoo in PyTorch with mpidl's recipe.

`python -m benchmarks time_to_accuracy` starts this side of the comparison as `python -m
benchmarks.torch_training TASK ADDRESS`. The images are one tensor in memory. A few tensor
operations crop, mirror and erase each mini-batch, which is faster than a DataLoader.
"""

import argparse
import copy
import os
import time
from typing import Any

import numpy as np

from benchmarks import subject, time_to_accuracy, torch_step, turns
from mpidl.data.transforms import normalize
from mpidl.nn import Network, zoo
from mpidl.training.schedules import rate_of
from mpidl.training.whitening import whiten

ATTEMPTS = 10  # rectangles drawn per image; the first rectangle that fits is erased
WARM_UP, TIMED = 3, 15  # steps of each variant
TEST_BATCH = 1000


class Images:
    """Training images with the random changes of a recipe.

    Parameters
    ----------
    pixels : np.ndarray
        Images, uint8 (n, C, H, W).
    labels : np.ndarray
        Labels (n,).
    normalization : Normalization
        Normalization with one centre and divisor per channel.
    options : TrainingOptions
        Recipe whose options `flip` (none or x), `flip_mode`, `translate`, `erase`, `erase_area`
        and `erase_aspect` apply.
    """

    def __init__(self, pixels, labels, normalization, options):
        import torch

        self.torch, self.options = torch, options
        self.shape = pixels.shape[1:]
        edge = options.translate
        padded = np.pad(pixels, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
        self.padded = torch.from_numpy(padded)
        self.labels = torch.from_numpy(np.asarray(labels, np.int64))
        centre, divisor = (normalization.arrays()[name] for name in ("centre", "divisor"))
        self.centre, self.divisor = (
            torch.from_numpy(np.asarray(values)).reshape(1, -1, 1, 1)
            for values in (centre, divisor)
        )
        self.first_flips = torch.rand(len(padded)) < 0.5

    def normalized(self, pixels):
        """Return pixels normalized for the network."""
        return (pixels.float() - self.centre) / self.divisor

    def order(self):
        """Return a random order of the images."""
        return self.torch.randperm(len(self.padded))

    def batch(self, indices, epoch: int) -> tuple[Any, Any]:
        """Return augmented images and their labels."""
        torch, options, count = self.torch, self.options, len(indices)
        channels, height, width = self.shape
        top, left = torch.randint(0, 2 * options.translate + 1, (2, count, 1))
        rows, columns = torch.arange(height), torch.arange(width)
        if options.flip == "x":
            is_mirrored = torch.rand(count) < 0.5
            if options.flip_mode == "alternate":
                is_mirrored = self.first_flips[indices] ^ bool(epoch % 2)
            mirrored = columns.flip(0)
            offsets = torch.where(is_mirrored[:, None], mirrored, columns) + left
        else:
            offsets = columns + left
        images = self.padded[
            indices[:, None, None, None],
            torch.arange(channels)[None, :, None, None],
            (rows + top)[:, None, :, None],
            offsets[:, None, None, :],
        ]
        if options.erase:
            noise = torch.randint(0, 256, images.shape, dtype=torch.uint8)
            images = torch.where(self.rectangles(count)[:, None], noise, images)
        return self.normalized(images), self.labels[indices]

    def rectangles(self, count: int):
        """Return masks (count, H, W) of the rectangles to erase; most are empty."""
        torch, options = self.torch, self.options
        _, height, width = self.shape
        (smallest, largest), (low, high) = (
            [float(number) for number in str(text).split(",")]
            for text in (options.erase_area, options.erase_aspect)
        )
        u = torch.rand(4, count, ATTEMPTS)
        area = (smallest + (largest - smallest) * u[0]) * height * width
        ratio = low * (high / low) ** u[1]
        h, w = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
        fits = (h >= 1) & (w >= 1) & (h <= height) & (w <= width)
        first_fit = fits.int().argmax(1, keepdim=True)
        is_erased = fits.any(1, keepdim=True) & (torch.rand(count, 1) < options.erase)
        h, w, y, x = (values.gather(1, first_fit) for values in (h, w, u[2], u[3]))
        y, x = ((height - h + 1) * y).floor(), ((width - w + 1) * x).floor()
        rows, columns = torch.arange(height), torch.arange(width)
        in_rows = (rows >= y) & (rows < y + h) & is_erased
        in_columns = (columns >= x) & (columns < x + w)
        return in_rows[:, :, None] & in_columns[:, None, :]


class Model:
    """Network of the zoo in PyTorch, with the optimizer and the weight average of a recipe.

    Parameters
    ----------
    net : Network
        Network with its initial weights.
    options : TrainingOptions
        Recipe.
    variant : str
        "eager", "channels_last" or "compile", or the last two joined by "+".
    """

    def __init__(self, net: Network, options, variant: str):
        import torch

        self.torch, self.options, words = torch, options, variant.split("+")
        self.module = torch_step.build_module(net, inplace="compile" not in words).train()
        self.layout = torch.contiguous_format
        if "channels_last" in words:
            self.layout = torch.channels_last
            self.module = self.module.to(memory_format=self.layout)
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": options.l2},
            {"params": [], "weight_decay": 0.0},
        ]
        decays = net.factors["l2_factors"]
        for name, parameter in torch_step.named_learnables(self.module):
            if name not in net.trainable:
                parameter.requires_grad_(False)
            else:
                groups[0 if decays[name] else 1]["params"].append(parameter)
        self.parameters = [p for group in groups for p in group["params"]]
        self.optimizer = torch_step.make_optimizer(
            "SGD",
            groups,
            lr=options.learning_rate,
            momentum=options.momentum,
            nesterov=options.nesterov == "on",
            fused=True,
        )
        self.averages = None
        self.model = torch.compile(self.module) if "compile" in words else self.module

    def step(self, images, labels, rate: float) -> None:
        """Take a training step, and update the average of the weights."""
        torch, options = self.torch, self.options
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        scores = self.scores(self.model, images)
        smoothing = options.label_smoothing
        torch.nn.functional.cross_entropy(scores, labels, label_smoothing=smoothing).backward()
        self.optimizer.step()
        if options.average == "ema":
            with torch.no_grad():
                if self.averages is None:
                    self.averages = [parameter.clone() for parameter in self.parameters]
                share = 1 - options.average_decay
                torch._foreach_lerp_(self.averages, self.parameters, share)

    def scores(self, model, images):
        """Return the float32 scores of a model that computes in the recipe's precision."""
        with torch_step.autocast(self.options.precision):
            return model(images.contiguous(memory_format=self.layout)).float()

    def accuracy(self, images, labels) -> float:
        """Return the accuracy of the averaged weights on normalized images."""
        torch, correct = self.torch, 0
        weights = [parameter.detach().clone() for parameter in self.parameters]
        self.module.eval()
        with torch.no_grad():
            if self.averages is not None:
                torch._foreach_copy_(self.parameters, self.averages)
            for first in range(0, len(images), TEST_BATCH):
                part = images[first : first + TEST_BATCH]
                scores = self.scores(self.module, part)
                if self.options.test_flips == "x":
                    scores = scores + self.scores(self.module, part.flip(3))
                correct += int((scores.argmax(1) == labels[first : first + TEST_BATCH]).sum())
            torch._foreach_copy_(self.parameters, weights)
        self.module.train()
        return correct / len(images)


def main() -> None:
    """Serve the requests of the benchmark (see `turns`) until it closes the connection."""
    job, address = subject.join(None, 0)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(job.threads)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no compiler processes outside the turns
    import torch

    torch.set_num_threads(job.threads)
    torch.set_num_interop_threads(1)
    torch.manual_seed(job.seed)
    store, test = time_to_accuracy.open_images(job.data)
    options = time_to_accuracy.recipe(job, job.seed)
    normalization = normalize.normalization(options.normalization, store)
    images = Images(store.read(np.arange(len(store))), store.labels, normalization, options)
    test_images = images.normalized(torch.from_numpy(test.read(np.arange(len(test)))))
    test_labels = torch.from_numpy(np.asarray(test.labels, np.int64))
    fastest = "eager"

    def network(seed):
        net = zoo.NETWORKS[job.network](store.image_shape, len(store.classes), seed)
        net.normalization = normalization
        whiten(net, store)
        return net

    def describe():
        arithmetic = torch.backends.cpu.get_cpu_capability()
        return {"versions": {"torch": torch.__version__}, "arithmetic": arithmetic}

    def variants(names):
        """Time some steps of each variant, and keep the fastest variant for the training runs."""
        nonlocal fastest
        seconds, failed = {}, {}
        net, size = network(job.seed), options.batch_size
        for name in names:
            try:
                model = Model(net, options, name)
                times = []
                for _ in range(WARM_UP + TIMED):
                    indices = torch.randint(0, len(images.padded), (size,))
                    start = time.perf_counter()
                    model.step(*images.batch(indices, 1), 1e-3)
                    times.append(time.perf_counter() - start)
                seconds[name] = float(np.median(times[WARM_UP:]))
            except Exception as error:  # torch.compile needs a C++ compiler
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        fastest = min(seconds, key=lambda name: seconds[name])
        return {"seconds": seconds, "failed": failed, "fastest": fastest}

    def training(seed):
        torch.manual_seed(seed)
        model = Model(network(seed), options, fastest)
        _warm_up(model, images, options)
        return _train(model, images, test_images, test_labels, job, options)

    turns.serve(address, 0, describe, variants, training)
    os._exit(0)  # some libraries have threads that never end


def _warm_up(model: Model, images: Images, options) -> None:
    """Let PyTorch compile the model, and restore the model's state."""
    state = copy.deepcopy(model.module.state_dict())
    model.step(*images.batch(images.order()[: options.batch_size], 1), 0.0)
    model.module.load_state_dict(state)
    model.optimizer.state.clear()
    model.averages = None


def _train(
    model: Model, images: Images, test_images, test_labels, job: argparse.Namespace, options
) -> dict[str, Any]:
    """Train until the accuracy is reached, and return a result like `Clock.result`."""
    seconds, iteration, accuracies = 0.0, 0, []
    per_epoch = len(images.padded) // options.batch_size
    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        order = images.order()[: per_epoch * options.batch_size]
        for indices in order.split(options.batch_size):
            iteration += 1
            rate = rate_of(options, epoch, iteration, per_epoch)
            model.step(*images.batch(indices, epoch), rate)
        seconds += time.perf_counter() - start
        accuracies.append(model.accuracy(test_images, test_labels))
        if accuracies[-1] >= job.accuracy:
            break
    return {
        "seconds": seconds if accuracies[-1] >= job.accuracy else None,
        "images_per_second": iteration * options.batch_size / seconds,
        "accuracies": accuracies,
    }


if __name__ == "__main__":
    main()
