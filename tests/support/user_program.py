"""A user's program for `test_types`, in which mypy reports types at `reveal_type`.

The program is only type-checked, never run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import mpidl as dl
from mpidl.core.op import WithVjp
from mpidl.training.optimizers import Optimizer, Rate
from mpidl.training.progress import EpochSummary, Progress
from mpidl.training.steps import StepResult
from mpidl.training.trainer import Trainer

if TYPE_CHECKING:
    from typing_extensions import reveal_type

# the README's loop
world = dl.World()
reveal_type(world)
reveal_type(world.rank)
reveal_type(world.size)
reveal_type(world.hosts)
train, test = dl.data.digits(world).split(0.9, seed=0)
reveal_type(train)
reveal_type(train.image_shape)
reveal_type(train.labels)
reveal_type(train.read([0, 1]))
net = dl.nn.zoo.digits(train.image_shape, len(train.classes), seed=0)
reveal_type(net)
queue = dl.MinibatchQueue(train, batch_size=128, seed=0, world=world)
reveal_type(queue)
sgdm = dl.SGDM(learning_rate=0.01, momentum=0.9)
reveal_type(sgdm)
reveal_type(sgdm.learning_rate)


def model_loss(net: dl.Network, images: dl.Blocked, labels: dl.Blocked) -> dl.Partial:
    scores = net(images)
    reveal_type(scores)
    reveal_type(net.logits(images))
    loss = dl.softmax_cross_entropy(scores, labels)
    reveal_type(loss)
    return loss


for epoch in range(1, 4):
    for images, labels in queue.epoch(epoch):
        reveal_type(images)
        reveal_type(labels)
        part, sums, net.state = dl.value_and_grad(model_loss)(net, images, labels)
        reveal_type(part)
        reveal_type(sums)
        loss, gradients = world.gplus(part), world.gplus(sums)
        reveal_type(loss)
        reveal_type(gradients)
        reveal_type(sgdm(net.parameters, gradients))
        net.parameters = sgdm(net.parameters, gradients)
        reveal_type(net.parameters)
        reveal_type(net.state)
    world.report(epoch=epoch, loss=loss)

result = dl.evaluate(net, test, world=world)
reveal_type(result)
reveal_type(result.accuracy)
reveal_type(result.loss)
reveal_type(result.confusion)


images, labels = next(queue.epoch(1))


# from the user guide: a loss with other values, reduced during the backward pass
def counting_loss(
    net: dl.Network, images: dl.Blocked, labels: dl.Blocked
) -> tuple[dl.Partial, dl.Partial]:
    scores = net(images)
    return dl.softmax_cross_entropy(scores, labels), dl.correct_count(scores, labels)


reveal_type(dl.value_and_grad(counting_loss)(net, images, labels))
step = dl.value_and_grad(counting_loss, reduce=world)
reveal_type(step(net, images, labels))

batch = dl.share(20, world, indices=np.arange(20), epoch=1, seed=0)
reveal_type(batch)
reveal_type(batch.indices)
pixels = dl.from_images(train.read(batch.indices) / np.float32(255), batch)
reveal_type(pixels)
reveal_type(pixels.local())
reveal_type(pixels.shape)
reveal_type(net(pixels).local())
reveal_type(net.predict(pixels))
reveal_type(net.predict(pixels.local()))


@dl.op
def scale_channels(x: np.ndarray, weight: np.ndarray) -> WithVjp[np.ndarray]:
    w = weight[:, None, None]
    return x * w, lambda dy: (dy * w, (dy * x).sum(axis=(0, 2, 3)))


reveal_type(scale_channels(images, np.ones(1)))
reveal_type(scale_channels(dl.Var(images), np.ones(1)))
reveal_type(dl.check_vjp(scale_channels, np.ones((3, 2, 4, 4)), np.ones(2)))


def penalized(
    learnables: Mapping[str, np.ndarray], images: dl.Blocked, labels: dl.Blocked
) -> dl.Partial:
    x = dl.flatten(scale_channels(images, learnables["scale"]))
    loss = dl.softmax_cross_entropy(dl.dense(x, learnables["weight"], learnables["bias"]), labels)
    return loss + 0.001 * dl.total(learnables["weight"] ** 2)


reveal_type(dl.value_and_grad(penalized, reduce=world)({"scale": np.ones(1)}, images, labels))

# ops on values and on Vars
filters = np.ones((4, 1, 3, 3), np.float32)
var = dl.Var(images)
reveal_type(dl.conv2d(images, filters, np.ones(4), stride=2, padding="same"))
reveal_type(dl.conv2d(var, dl.Var(filters), np.ones(4)))
reveal_type(dl.batchnorm(images, np.ones(1), np.zeros(1)))
reveal_type(dl.max_pool2d(dl.relu(images), 2, stride=2))
reveal_type(dl.leaky_relu(var, 0.1))
reveal_type(dl.global_average_pool2d(var))
reveal_type(dl.concat(images, images))
reveal_type(dl.mean(images))
reveal_type(dl.mean(var))
reveal_type(dl.mean(images, axis=(2, 3), keepdims=True))
reveal_type(dl.sum(var, axis=1))
reveal_type(dl.one_hot(labels, 10))
reveal_type(dl.one_hot(np.arange(3), 10))
reveal_type(dl.cross_entropy(images, dl.one_hot(labels, 10)))
reveal_type(dl.cross_entropy(dl.softmax(var), labels))
reveal_type(dl.softmax_cross_entropy(var, labels))
reveal_type(train.split(0.8, 0.1))
reveal_type(train.class_counts())
reveal_type(dl.classify(net, test, names=True))
reveal_type(dl.mean_squared_error(images, images))
reveal_type(dl.exp(images))
reveal_type(dl.total(np.ones(3)))
reveal_type(images + images)
reveal_type(2.0 * var - images)
reveal_type(dl.add(images, 1.0))
reveal_type(dl.multiply(2.0, var))
reveal_type(dl.mean(images) + 2 * dl.sum(images))

# training with dl.train
options = dl.TrainingOptions(epochs=2, solver="adam", validation=test, plots="none")
reveal_type(options)
reveal_type(options.epochs)
reveal_type(options.learning_rate)
reveal_type(options.solver)
reveal_type(options.validation)
reveal_type(dl.TrainingOptions.from_recipe("digits"))
trained = dl.train(net, train, options, world=world, out="runs/typed")
reveal_type(trained)
reveal_type(trained.loss)
reveal_type(trained.stopped)
reveal_type(dl.predict(net, test, world=world))
reveal_type(dl.classify(net, test))
reveal_type(dl.activations(net, test, "conv1"))
reveal_type(dl.regression_errors(net, test))
reveal_type(dl.confusion_matrix([0, 1], [1, 1]))
reveal_type(dl.confusion_matrix([0, 1], [1, 1]).recall)
dl.save_model("model.h5", net, train.classes)
loaded, description = dl.load_model("model.h5")
reveal_type(loaded)
reveal_type(description)
reveal_type(dl.weights_sha256(net))

# networks and their layers
small = dl.Network([dl.Conv2D(3, 8), dl.ReLU(), dl.Dense(10, name="scores")], (1, 28, 28), seed=0)
reveal_type(small["scores"])
reveal_type(small.layers)
reveal_type(small.layer_names)
reveal_type(small.factors)
reveal_type(small.freeze("conv1"))
reveal_type(small.replace_layers({"scores": dl.Dense(5)}))
reveal_type(small.up_to("conv1"))
reveal_type(small.table())
reveal_type(small.analyze())
reveal_type(dl.analyze(small).rows)
reveal_type(small.output_shape)
reveal_type(small.classes)
reveal_type(small.training)


@dataclass
class Scale(dl.Layer):
    def build(self, shape: tuple[int, ...]) -> dl.Built:
        return dl.Built(shape, {"weight": ((shape[0],), 1.0)})

    def forward(self, x: dl.Blocked | dl.Var, context: dl.nn.LayerContext) -> dl.Blocked | dl.Var:
        reveal_type(context["weight"])
        reveal_type(dl.relu(x))
        return scale_channels(x, context["weight"])


custom = dl.Network([Scale(), dl.Dense(10)], train.image_shape)
dl.load_model("scaled.h5", layers=[Scale])


class Descent:
    """A custom optimizer."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def __call__(
        self, parameters: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        return {name: w - self.learning_rate * gradients[name] for name, w in parameters.items()}

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        pass


class Stop:
    """A custom hook."""

    def iteration(self, trainer: Trainer, result: StepResult) -> None:
        reveal_type(result.loss)
        reveal_type(trainer.position.iteration)
        reveal_type(trainer.net)
        reveal_type(trainer.queue)
        reveal_type(trainer.optimizer)
        reveal_type(trainer.validation.last)
        trainer.stop()

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        reveal_type(summary.accuracy)


def output_function(progress: Progress) -> bool:
    reveal_type(progress.validation_loss)
    return progress.loss is not None and progress.loss < 0.1


dl.train(
    custom,
    train,
    dl.TrainingOptions(output_functions=output_function, loss=model_loss),
    optimizer=Descent(0.1),
    hooks=[Stop()],
)
chain = Optimizer(0.1, Rate())
reveal_type(chain.state())

# image sets
arrays = dl.ArrayDatastore(np.zeros((4, 1, 8, 8), np.uint8), labels=[0, 1, 0, 1])
reveal_type(arrays)
reveal_type(arrays.classes)
reveal_type(arrays.read([0]))
reveal_type(arrays.subset([0]))
reveal_type(arrays.transform(np.flipud))
reveal_type(dl.ImageFolder("flowers", world).files)
reveal_type(dl.data.combined(arrays, arrays))
reveal_type(dl.data.open_data("flowers", world))
reveal_type(dl.data.open_test_data("flowers"))
reveal_type(dl.data.normalization("zscore", arrays))
reveal_type(dl.data.preprocessed(arrays, dl.Preprocess(size=(8, 8))))
reveal_type(dl.Augmenter(reflect_x=True, rotation=10))
reveal_type(len(queue))
reveal_type(queue.order(1))

# ranks
reveal_type(world.gop("and", True))
reveal_type(world.gop("max", 1.5))
reveal_type(world.gplus(len(images.local())))
reveal_type(world.allgather(1))
reveal_type(world.gather("text"))
reveal_type(world.broadcast({"a": 1}))
reveal_type(world.allreduce(2, op="max"))
reveal_type(dl.OneRank().gplus(dl.mean(images)))


def on_ranks(world: dl.World, numbers: Sequence[int]) -> float:
    return world.gplus(float(numbers[world.rank]))


reveal_type(dl.launch(on_ranks, [1, 2], ranks=2))
