"""Train on several ranks from a notebook, or from a script such as this one, without mpirun.

python examples/from_a_notebook.py [RANKS] [FOLDER OF IMAGES] [EPOCHS]

The `# %%` lines separate the cells of a notebook. In a notebook, the lines of `main` form one cell.
There, `plots="live"` shows the curves while the ranks train. *Interrupt* stops the training and
returns the network trained so far, as Ctrl-C does in a script.
"""

import sys

# %%
import mpidl as dl


# %% runs on each rank
def trained(world, data, epochs):
    images, _ = dl.data.open_data(data, world)
    train, test = images.split(0.9, seed=0)
    net = dl.nn.zoo.digits(train.image_shape, len(train.classes), seed=0)
    options = dl.TrainingOptions.from_recipe("digits", epochs=epochs, validation=test)
    result = dl.train(net, train, options, world=world)
    return net, result, dl.evaluate(net, test, world=world, top_k=2, confusion=True)


# %% runs here
def main(ranks=None, data="digits", epochs=3):
    count = None if ranks is None else int(ranks)  # None: one rank per core
    net, result, evaluation = dl.launch(trained, data, int(epochs), ranks=count, plots="live")
    if result.stopped:
        print(f"Stopped at iteration {result.iterations}")
    print(evaluation.confusion)
    print(f"Accuracy: {evaluation.accuracy:.4f}, of the first two: {evaluation.top_k:.4f}")
    print(f"Weights sha256: {dl.weights_sha256(net)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
