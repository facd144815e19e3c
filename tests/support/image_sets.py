"""Write images to disk and simulate ranks, for the tests of `mpidl.data`."""

import gzip
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from mpidl.data.datastore import Datastore
from mpidl.errors import UserError


def pixels_of(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path, pixels, **options):
    """Write (C, H, W) pixels as an image file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(
        path, **options
    )
    return path


def grow(folder, classes=("cat", "dog", "emu"), per_class=3, shape=(1, 6, 5)):
    """Write PNG files into one sub-folder per class; return {relative path: pixels}."""
    drawn = {}
    for c, name in enumerate(classes):
        for i in range(per_class):
            drawn[f"{name}/{i}.png"] = pixels_of((c, i), *shape)
            save(folder / name / f"{i}.png", drawn[f"{name}/{i}.png"])
    return drawn


class ReadArrays(Datastore):
    """A datastore that reads images from arrays batch by batch, with targets or labels."""

    def __init__(self, images, targets=None, labels=None):
        self.images, self.values, self.image_shape = images, targets, images.shape[1:]
        if targets is not None:
            self.targets_shape, self.targets_dtype = targets.shape[1:], targets.dtype
        if labels is not None:
            self.labels, self.classes = labels, [f"class {c}" for c in range(max(labels) + 1)]

    def __len__(self):
        return len(self.images)

    def read(self, indices):
        return self.images[indices]

    def targets(self, indices):
        return self.values[indices]


def write_idx(path, values, code=0x08):
    header = bytes([0, 0, code, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
        file.write(header + values.tobytes())
    return path


def refusal(function, *args, **kwargs):
    """Return the text of the UserError that the call raises; the text must be one line."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


def on_ranks(size, function, hosts=None):
    """Return the results or exceptions of function(world) on simulated ranks, run as threads."""
    barrier = threading.Barrier(size)
    hosts = hosts or ["node0"] * size
    slots = [None] * size

    class World:
        def __init__(self, rank):
            self.rank, self.size, self.hosts, self.host = rank, size, hosts, hosts[rank]

        def exchange(self, value):
            slots[self.rank] = value
            barrier.wait()
            values = list(slots)
            barrier.wait()
            return values

        def broadcast(self, value, root=0):
            return self.exchange(value)[root]

        def raise_if_any(self, error):
            errors = [e for e in self.exchange(error) if e is not None]
            if errors:
                raise UserError(str(errors[0]))

        def available_shared_bytes(self):
            return 1 << 30

        def shared_array(self, shape, dtype):
            return self.exchange(np.zeros(shape, dtype))[hosts.index(self.host)]

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(function, World(rank)) for rank in range(size)]
    return [future.exception() or future.result() for future in futures]
