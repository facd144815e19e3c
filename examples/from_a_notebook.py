"""Train on several ranks from a notebook, or from a script as this one, without mpirun.

python examples/from_a_notebook.py [RANKS] [FOLDER OF IMAGES] [EPOCHS]

What `# %%` divides are a notebook's cells; there, main's lines would stand by themselves.
"""

import sys

# %%
import mpidl as dl


# %% on each of the ranks
def trained(world, data, epochs):
    images, _ = dl.data.open_data(data, world)
    train, test = images.split(0.9, seed=0)
    net = dl.nn.zoo.digits(train.image_shape, len(train.classes), seed=0)
    options = dl.TrainingOptions.from_recipe("digits", epochs=epochs)
    dl.train(net, train, options, world=world)
    return net, dl.evaluate(net, test, world=world, top_k=2, confusion=True)


# %% here
def main(ranks=None, data="digits", epochs=3):
    count = None if ranks is None else int(ranks)  # None: as many as there are cores
    net, found = dl.launch(trained, data, int(epochs), ranks=count)
    print(found.confusion)
    print(f"Accuracy: {found.accuracy:.4f}, of the first two: {found.top_k:.4f}")
    print(f"Weights sha256: {dl.weights_sha256(net)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
