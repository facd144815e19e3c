"""A network: its layers, their learnables and their state."""

import copy
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mpidl import ops
from mpidl.autodiff import value_of
from mpidl.blocks import Blocked, OneRank, from_images, share
from mpidl.nn import fusion, graph
from mpidl.nn.layers import Layer, LayerContext, Softmax
from mpidl.nn.summary import Analysis, times
from mpidl.ops import check
from mpidl.text import aligned, did_you_mean


class _Run(NamedTuple):
    """Layers that are applied at once."""

    layers: tuple
    reads: tuple  # the names that the first one reads
    done: list  # the names that nobody reads afterwards


class Network:
    """Layers, each of which reads the one before it in the list, or others that it names.

    layers: list of `Layer`s, the last of which gives the network's output; input_shape: (C, H, W)
    of an image; seed: of the initial learnables, which depend on it and on the layers' names alone.
    batchnorm: "global" or "local", whose statistics normalize in training; `dl.train` sets it from
    its options. Raises ValueError where a layer reads a name that is not before it in the list or
    images of a shape that do not fit, or where nobody reads what a layer gives.

    net["conv1"] is a layer; layer_names: all names.

    normalization, crop, preprocess: how images were brought to the network in training, which
    `dl.train` and the commands set, files keep and evaluation follows: a `Normalization` (None:
    uint8 pixels / 255), the (P, Q) that larger images are cut to, a `Preprocess`.

    classes: the names of the classes that its outputs (K, ...) are scores of, a tuple of K, set and
    kept as these are; () where it was trained to give numbers, None where they are not known.

    fuse: whether convolution, batch normalization and ReLU in a row run as one op (with the same
    numbers).

    parameters, state: {"conv1.weight": float32 array, ...}, in the order of the layers; assign a
    new dict to change them. Inside `value_and_grad` the network it passes to your function is bound
    to the learnables being differentiated and runs in training mode.
    """

    def __init__(self, layers, input_shape, seed=0, batchnorm="global"):
        self.layers = _named(layers)
        self.input_shape = tuple(int(n) for n in input_shape)
        self.seed, self.batchnorm, self.training, self.fuse = seed, batchnorm, False, True
        self.reads = graph.edges(self.layers)
        shapes, parameters, state = {graph.IMAGES: self.input_shape}, {}, {}
        for layer, names in zip(self.layers, self.reads, strict=True):
            built = _built(layer, [(name, shapes[name]) for name in names])
            for made, wanted in ((parameters, built.learnables), (state, built.state)):
                for name, (size, initial) in wanted.items():
                    key = f"{layer.name}.{name}"
                    value = initial(seed, key, size) if callable(initial) else initial
                    made[key] = np.full(size, value, np.float32)
            for name in built.learnables:
                _check_factors(layer, name)
            shapes[layer.name] = built.output_shape
        self.output_shapes = [shapes[layer.name] for layer in self.layers]
        self._parameters, self._state = parameters, state
        self.normalization = self.crop = self.preprocess = self.classes = None
        self._plan()

    def _plan(self):
        """Find the runs of layers, fused and one by one."""
        self._runs = {}
        singly = [(i,) for i in range(len(self.layers))]
        for fused, runs in ((True, fusion.runs(self.layers, self.reads)), (False, singly)):
            ends = graph.last_readers(self.reads, runs)
            self._runs[fused] = [
                _Run(tuple(self.layers[i] for i in run), self.reads[run[0]], done)
                for run, done in zip(runs, ends, strict=True)
            ]

    @property
    def layer_names(self):
        """The layers' names, in the order of the list."""
        return [layer.name for layer in self.layers]

    def __getitem__(self, name):
        """The layer of a name; KeyError where there is none."""
        return self.layers[self._number(name)]

    def _number(self, name):
        if name not in self.layer_names:
            last = f": the last ones are {', '.join(self.layer_names[-5:])}"
            raise KeyError(f"no layer {name}{did_you_mean(name, self.layer_names) or last}")
        return self.layer_names.index(name)

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
        """{learnable: shape of the images it goes with} of each layer.

        Flattened images lie on a GPU as they did before, through layers without learnables, too.
        """
        own = {name.rsplit(".", 1)[0] for name in self._parameters}
        shapes, befores = {graph.IMAGES: self.input_shape}, {}
        for layer, reads, shape in zip(self.layers, self.reads, self.output_shapes, strict=True):
            before = befores[layer.name] = shapes[reads[0]]
            flat = len(shape) == 1 and shape[0] == math.prod(before) and layer.name not in own
            shapes[layer.name] = before if flat else shape
        return {name: befores[name.rsplit(".", 1)[0]] for name in self._parameters}

    @property
    def trainable(self):
        """{name: array} of the learnables that are differentiated: all but those of frozen layers
        and those whose learning-rate factor is 0."""
        moving = self.factors["learning_rate_factors"]
        return {name: value for name, value in self._parameters.items() if moving[name]}

    @property
    def factors(self):
        """The layers' factors as an optimizer takes them: dl.SGDM(0.01, **net.factors)."""
        found, layers = {}, {layer.name: layer for layer in self.layers}
        for name in self._parameters:
            layer, learnable = name.rsplit(".", 1)
            found[name] = layers[layer].factors(learnable)
        return {
            "learning_rate_factors": {name: rate for name, (rate, _) in found.items()},
            "l2_factors": {name: decay for name, (_, decay) in found.items()},
        }

    def freeze(self, *names):
        """Freeze the layers of these names; returns the network.

        A frozen layer keeps its learnables and its state: they are not differentiated, and it runs
        as in prediction (a batch normalization by its running state). Backward stops where nothing
        below is trained. KeyError for an unknown name.
        """
        return self._set_trainable(names, False)

    def unfreeze(self, *names):
        """Train the layers of these names again; returns the network."""
        return self._set_trainable(names, True)

    def _set_trainable(self, names, trainable):
        layers = list(self.layers)
        for i in map(self._number, names):
            layers[i] = copy.copy(layers[i])
            layers[i].trainable = trainable
        self.layers = layers
        self._plan()
        return self

    def replace_layers(self, layers, seed=None):
        """A new network with some layers replaced: {"dense1": dl.Dense(5)}.

        All other layers keep their learnables and state, byte for byte; the new ones' are initial,
        by the seed (None: the network's own). A new layer has the old one's name unless it has one
        of its own, and reads what the old one read unless it says otherwise. It lies in host
        memory, and keeps `classes` where it gives as many outputs. Raises KeyError for an unknown
        name, TypeError for what is not one layer (a list of them, None) and ValueError where the
        learnables of another layer would change their shapes.
        """
        made, renamed = list(self.layers), {}
        for name, layer in layers.items():
            i = self._number(name)
            if not isinstance(layer, Layer):
                raise TypeError(f"replace_layers: expected one layer for {name}, got {layer!r}")
            made[i], old = copy.copy(layer), self.layers[i]
            made[i].name = layer.name or name
            renamed[name] = made[i].name
            if getattr(layer, "inputs", None) == () and graph.several_of(old):
                made[i].inputs = old.inputs
            elif made[i].after is None and graph.several_of(made[i]) is None:
                made[i].after = old.after
        made = [graph.with_names(layer, renamed) for layer in made]
        seed = self.seed if seed is None else seed
        net = type(self)(made, self.input_shape, seed=seed, batchnorm=self.batchnorm)
        net.fuse, net.normalization = self.fuse, self.normalization
        net.crop, net.preprocess = self.crop, self.preprocess
        as_many = net.output_shape[:1] == self.output_shape[:1]
        net.classes = self.classes if as_many else None
        for new, old in ((net._parameters, self._parameters), (net._state, self._state)):
            kept = [name for name in old if name.rsplit(".", 1)[0] not in layers]
            for name in kept:
                if new[name].shape != old[name].shape:
                    raise ValueError(
                        f"replace_layers: {name} has shape {old[name].shape}, and needs "
                        f"{new[name].shape} behind the new layers: replace its layer, too"
                    )
                new[name] = np.array(old[name])
        return net

    def up_to(self, name):
        """A network whose output is that of the layer of a name: of this one's layers those that it
        depends on, with the same arrays. KeyError for an unknown name."""
        last, part = self._number(name), copy.copy(self)
        needed = {name}
        part.classes = self.classes if last == len(self.layers) - 1 else None
        for i in range(last, -1, -1):
            if self.layers[i].name in needed:
                needed.update(self.reads[i])
        chosen = [i for i, layer in enumerate(self.layers) if layer.name in needed]
        part.layers = [copy.copy(self.layers[i]) for i in chosen]
        for i, layer in zip(chosen, part.layers, strict=True):
            if layer.after is None and graph.several_of(layer) is None:
                (layer.after,) = self.reads[i]  # the layer before it may not be there
        part.reads = [self.reads[i] for i in chosen]
        part.output_shapes = [self.output_shapes[i] for i in chosen]
        for table in ("_parameters", "_state"):
            arrays = getattr(self, table).items()
            setattr(part, table, {k: v for k, v in arrays if k.rsplit(".", 1)[0] in needed})
        part._plan()
        return part

    def bind(self, learnables):
        """A copy in training mode, with other values for some or all learnables; its state is its
        own."""
        bound = copy.copy(self)
        bound._parameters, bound.training = self._parameters | learnables, True
        bound._state = dict(self._state)
        return bound

    def with_layers(self, layers):
        """A copy in which these stand for the layers, one for one: other settings of the same
        kinds, for the same arrays."""
        made = copy.copy(self)
        made.layers = list(layers)
        made._plan()
        return made

    def __call__(self, images):
        """The last layer's output for Blocked images: (N, *output_shape)."""
        if images.shape[1:] != self.input_shape:
            raise ValueError(
                f"the network takes images of shape {self.input_shape}, got {images.shape[1:]}"
            )
        return self._apply(images, self._runs_of(images), self.layers[-1].name)

    def logits(self, images):
        """What losses take for Blocked images: the output, or what the Softmax reads that the
        network ends in, because losses have it built in."""
        if not isinstance(self.layers[-1], Softmax):
            return self(images)
        return self._apply(images, self._runs_of(images)[:-1], *self.reads[-1])

    def _runs_of(self, images):
        check.images("a network", value_of(images))
        return self._runs[self.fuse and fusion.fuses(images)]

    def _apply(self, images, runs, wanted):
        """The output of a layer that none of these runs is the last to read."""
        outputs = {graph.IMAGES: images}
        for run in runs:
            places = [self._at(layer) for layer in run.layers]
            x = tuple(outputs[name] for name in run.reads)
            x = x if graph.several_of(run.layers[0]) else x[0]
            if len(run.layers) > 1:
                x = fusion.forward(run.layers, x, places)
            else:
                x = run.layers[0].forward(x, places[0])
            outputs[run.layers[-1].name] = x
            for name in run.done:
                outputs.pop(name, None)
        return outputs[wanted]

    def _at(self, layer):
        training = self.training and layer.trainable
        return LayerContext(layer, self._parameters, self._state, training, self.batchnorm)

    def predict(self, images):
        """Class scores (softmax): Blocked for Blocked images, (n, K) for an (n, C, H, W) array.

        Arrays are normalized as in training: where nothing else was said, uint8 pixels are divided
        by 255 and floats are left as they are.
        """
        if isinstance(images, Blocked):
            return ops.softmax(self.logits(images))
        if self.on_device:
            raise TypeError(
                "predict takes arrays where the network lies in host memory: net.to(None)"
            )
        images = np.asarray(images)
        if self.normalization is not None:
            images = self.normalization(images)
        images = images / np.float32(255) if images.dtype == np.uint8 else images
        batch = share(len(images), OneRank())
        images = from_images(images.astype(np.float32), batch)
        return ops.softmax(self.logits(images)).local()

    def seen(self):
        """What a `MinibatchQueue` is told to show images to this network as in its training."""
        return {"normalization": self.normalization, "crop": self.crop}

    def takes(self, shape):
        """Whether images (C, H, W) are as large as the network's, or larger where it saw windows of
        larger ones in training."""
        (c, *size), (own, *least) = shape, self.input_shape
        larger = all(n >= m for n, m in zip(size, least, strict=True))
        return c == own and (size == least or (self.crop is not None and larger))

    def spec(self):
        """The layers as a list of JSON-able dicts; see `from_spec`."""
        return [layer.spec() for layer in self.layers]

    @classmethod
    def from_spec(cls, specs, input_shape, **options):
        """The network of a model file's list of layers, with initial learnables."""
        from mpidl import nn  # the layers that there are, wherever they are defined

        made = []
        for spec in specs:
            arguments = dict(spec)
            kind = getattr(nn, arguments.pop("type", ""), None)
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

    def stored(self):
        """The names of the layers whose outputs a training step stores; of a run of fused layers
        the convolution's."""
        return {run.layers[0].name for run in self._runs[self.fuse]}

    def analyze(self, batch_size=128):
        """The `Analysis` of the layers: shapes, learnables, memory, operations."""
        return Analysis(self, batch_size)

    def __str__(self):
        counts = {layer.name: 0 for layer in self.layers}
        for name, _, _, count in self.table():
            counts[name] += count
        rows = [("layer", "type", "output", "learnables")]
        rows.append(("images", "", times(self.input_shape), ""))
        for layer, shape in zip(self.layers, self.output_shapes, strict=True):
            count = f"{counts[layer.name]:,}" if counts[layer.name] else ""
            rows.append((layer.name, type(layer).__name__, times(shape), count))
        return "\n".join([*aligned(rows, left=2), f"{sum(counts.values()):,} learnables"])


def _tuples(value):
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _built(layer, reads):
    """What a layer needs for [(name, shape)] that it reads."""
    shapes = tuple(shape for _, shape in reads)
    try:
        return layer.build(shapes[0] if graph.several_of(layer) is None else shapes)
    except ValueError as error:
        what = ", ".join(f"{name}: {times(shape)}" for name, shape in reads)
        raise ValueError(f"{error} ({layer.name} reads {what})") from error


def _check_factors(layer, learnable):
    for value in layer.factors(learnable):
        if not (check.are_numbers(value) and value >= 0 and math.isfinite(value)):
            raise ValueError(
                f"{layer.name}: factors of learning rate and L2 are at least 0, got {value!r} for "
                f"{learnable}"
            )


def _named(layers):
    """Copies of the layers, those without a name called by type and number: conv1, relu2."""
    named, counts = [], {}
    if isinstance(layers, Layer):
        raise TypeError(f"expected a list of layers, got a {type(layers).__name__} alone")
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"expected a list of layers, got {layers!r}")
    if not layers:
        raise ValueError("a network has at least one layer")
    for layer in layers:
        if not isinstance(layer, Layer):
            raise TypeError(f"expected a list of layers, got {layer!r} in it")
        layer = copy.copy(layer)
        kind = type(layer).__name__.lower().removesuffix("2d")
        counts[kind] = counts.get(kind, 0) + 1
        layer.name = layer.name or f"{kind}{counts[kind]}"
        named.append(layer)
    names: list[str] = [layer.name for layer in named]
    for name in names:
        if not isinstance(name, str) or names.count(name) > 1 or "." in name or "/" in name:
            raise ValueError(f"layer names must be unique texts without '.' or '/', got {name!r}")
        if name == graph.IMAGES:
            raise ValueError(f"{name!r} is what a network is given: no layer can have that name")
    return named


def _same_names(what, old, new):
    if list(old) != list(new) or any(old[k].shape != np.shape(new[k]) for k in old):
        raise ValueError(
            f"{what}: expected {', '.join(f'{k} {v.shape}' for k, v in old.items())}; got "
            f"{', '.join(f'{k} {np.shape(v)}' for k, v in new.items())}"
        )
    return dict(new)
