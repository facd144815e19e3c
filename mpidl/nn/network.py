"""A network: layers in a row, their learnables and their state."""

import copy

import numpy as np

from mpidl import ops
from mpidl.blocks import Blocked, OneRank, from_images, share
from mpidl.nn import fusion
from mpidl.nn import layers as layer_types
from mpidl.nn.layers import At, Layer


class Network:
    """Layers in a row.

    layers: list of `Layer`s; input_shape: (C, H, W) of an image; seed: of the initial learnables,
    which depend on it and on the layers' names alone. batchnorm: "global" or "local", whose
    statistics normalize in training; `dl.train` sets it from its options.

    fuse: whether convolution, batch normalization and ReLU in a row run as one op (with the same
    numbers).

    parameters, state: {"conv1.weight": float32 array, ...}, in the order of the layers; assign a
    new dict to change them. Inside `value_and_grad` the network it passes to your function is bound
    to the learnables being differentiated and runs in training mode.
    """

    def __init__(self, layers, input_shape, seed=0, batchnorm="global"):
        self.layers = _named(layers)
        self.input_shape = tuple(int(n) for n in input_shape)
        self.seed, self.batchnorm, self.training = seed, batchnorm, False
        self.fuse, self._runs = True, fusion.runs(self.layers)
        self.output_shapes, parameters, state = [], {}, {}
        shape = self.input_shape
        for layer in self.layers:
            built = layer.build(shape)
            for made, wanted in ((parameters, built.learnables), (state, built.state)):
                for name, (size, initial) in wanted.items():
                    key = f"{layer.name}.{name}"
                    value = initial(seed, key, size) if callable(initial) else initial
                    made[key] = np.full(size, value, np.float32)
            shape = built.output_shape
            self.output_shapes.append(shape)
        self._parameters, self._state = parameters, state

    @property
    def parameters(self):
        return self._parameters

    @parameters.setter
    def parameters(self, values):
        self._parameters = _same_names("parameters", self._parameters, values)

    @property
    def state(self):
        return self._state

    @state.setter
    def state(self, values):
        self._state = _same_names("state", self._state, values)

    @property
    def output_shape(self):
        """Shape of the output for one image: (classes,) for a classifier."""
        return self.output_shapes[-1]

    def to(self, device):
        """Move the learnables and the state to a GPU (a world's `device`), or to this host's memory
        (None); returns the network. What an op takes must lie where its images do."""
        if device is None:
            self._parameters = {name: np.asarray(a) for name, a in self._parameters.items()}
            self._state = {name: np.asarray(a) for name, a in self._state.items()}
            return self
        from mpidl.backends.gpu import array

        self._parameters = array.together(self._parameters, self._image_shapes())
        self._state = array.together(self._state, {})
        return self

    @property
    def on_device(self):
        """Whether the learnables and the state lie on a GPU."""
        arrays = [*self._parameters.values(), *self._state.values()]
        return bool(arrays) and not isinstance(arrays[0], np.ndarray)

    def on(self, device):
        """This network where it lies there already, else a copy that was moved: see `to`."""
        there = self.on_device == (device is not None)
        return self if there else copy.copy(self).to(device)

    def _image_shapes(self):
        """{learnable: shape of the images it goes with} of each layer."""
        befores = [self.input_shape, *self.output_shapes[:-1]]
        shapes = {layer.name: shape for layer, shape in zip(self.layers, befores, strict=True)}
        return {name: shapes[name.rsplit(".", 1)[0]] for name in self._parameters}

    def bind(self, learnables):
        """A copy in training mode, bound to other learnables; its state is its own."""
        bound = copy.copy(self)
        bound._parameters, bound._state, bound.training = learnables, dict(self._state), True
        return bound

    def __call__(self, images):
        """The last layer's output for Blocked images: (N, *output_shape)."""
        if images.shape[1:] != self.input_shape:
            raise ValueError(
                f"the network takes images of shape {self.input_shape}, got {images.shape[1:]}"
            )
        x, fuse = images, self.fuse and fusion.fuses(images)
        for run in self._runs if fuse else [[layer] for layer in self.layers]:
            places = [
                At(layer, self._parameters, self._state, self.training, self.batchnorm)
                for layer in run
            ]
            if len(run) > 1:
                x = fusion.forward(run, x, places)
            else:
                x = run[0].forward(x, places[0])
        return x

    def predict(self, images):
        """Class scores (softmax): Blocked for Blocked images, (n, K) for an (n, C, H, W) array.

        Arrays are taken as the network was trained: uint8 pixels are divided by 255.
        """
        if isinstance(images, Blocked):
            return ops.softmax(self(images))
        if self.on_device:
            raise TypeError(
                "predict takes arrays where the network lies in host memory: net.to(None)"
            )
        images = np.asarray(images)
        images = images / np.float32(255) if images.dtype == np.uint8 else images
        batch = share(len(images), OneRank())
        return ops.softmax(self(from_images(images.astype(np.float32), batch))).local()

    def spec(self):
        """The layers as a list of JSON-able dicts; see `from_spec`."""
        return [layer.spec() for layer in self.layers]

    @classmethod
    def from_spec(cls, specs, input_shape, **options):
        """The network of a model file's list of layers, with initial learnables."""
        made = []
        for spec in specs:
            arguments = dict(spec)
            kind = getattr(layer_types, arguments.pop("type", ""), None)
            if not (isinstance(kind, type) and issubclass(kind, Layer)):
                raise ValueError(
                    f"unknown layer type {spec.get('type')!r}: a file can name the layers of "
                    "mpidl alone"
                )
            made.append(kind(**{k: _tuples(v) for k, v in arguments.items()}))
        return cls(made, input_shape, **options)

    def table(self, kind="parameters"):
        """Rows (layer, name, shape, count) of "parameters" (learnables) or "state"."""
        arrays = {"parameters": self._parameters, "state": self._state}[kind]
        return [(*key.rsplit(".", 1), a.shape, int(np.prod(a.shape))) for key, a in arrays.items()]

    def __str__(self):
        rows = [("layer", "type", "output", "learnables")]
        counts = {layer.name: 0 for layer in self.layers}
        for name, _, _, count in self.table():
            counts[name] += count
        rows.append(("images", "", _times(self.input_shape), ""))
        for layer, shape in zip(self.layers, self.output_shapes, strict=True):
            count = f"{counts[layer.name]:,}" if counts[layer.name] else ""
            rows.append((layer.name, type(layer).__name__, _times(shape), count))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}".rstrip()
            for a, b, c, d in rows
        ]
        return "\n".join([*lines, f"{sum(counts.values()):,} learnables"])


def _times(shape):
    return "x".join(map(str, shape))


def _tuples(value):
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _named(layers):
    """Copies of the layers, those without a name called by type and number: conv1, relu2."""
    named, counts = [], {}
    for layer in layers:
        if not isinstance(layer, Layer):
            raise TypeError(f"a network is a list of layers, got {layer!r}")
        layer = copy.copy(layer)
        kind = type(layer).__name__.lower().removesuffix("2d")
        counts[kind] = counts.get(kind, 0) + 1
        layer.name = layer.name or f"{kind}{counts[kind]}"
        named.append(layer)
    names: list[str] = [layer.name for layer in named]
    for name in names:
        if names.count(name) > 1 or "." in name or "/" in name:
            raise ValueError(f"layer names must be unique and without '.' or '/', got {name!r}")
    return named


def _same_names(what, old, new):
    if list(old) != list(new) or any(old[k].shape != np.shape(new[k]) for k in old):
        raise ValueError(
            f"{what}: expected {', '.join(f'{k} {v.shape}' for k, v in old.items())}; got "
            f"{', '.join(f'{k} {np.shape(v)}' for k, v in new.items())}"
        )
    return dict(new)
