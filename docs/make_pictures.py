"""Make the pictures of the documentation, each by the command or the code that users run.

    python docs/make_pictures.py            all pictures, into docs/pictures
    python docs/make_pictures.py NAME ...   these

Terminal pictures need tmux; the others need `pip install '.[plots]'`. The pictures of the notebooks
come from docs/run_notebooks.py. Trainings run in a temporary folder and take a few minutes.
"""

import functools
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import mpidl as dl

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "pictures"
BLUE, ORANGE, GREEN, GRAY = "#2c6fbb", "#c8501e", "#3d8b52", "#8a8f98"
RANK_COLOURS = (BLUE, ORANGE, GREEN)
TRAIN = ("python", "-m", "mpidl.train")


@functools.cache
def work():
    """Return a temporary folder that lasts as long as this program."""
    folder = Path(tempfile.mkdtemp(prefix="mpidl-pictures-"))
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def run(*command):
    """Run a command in the temporary folder and return what it prints."""
    result = subprocess.run(
        [str(word) for word in command], cwd=work(), capture_output=True, text=True
    )
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {result.returncode}\n{result.stderr}")
    return result.stdout


@functools.cache
def trained():
    """Return the folder of a run of the digits network on two ranks."""
    run("mpirun", "-n", 2, *TRAIN, "--epochs", 5, "--out", "runs/digits", "--verbose", "off")
    return work() / "runs" / "digits"


def terminal(name, command, text):
    """Draw a terminal in which a command has printed a text (with ANSI colours) as an SVG file."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    prompt = Text("$ ", style="bold green") + Text(command, style="bold")
    lines = Text("\n").join([prompt, Text.from_ansi(text.rstrip("\n"))])
    width = 3 + max(len(line) for line in lines.plain.splitlines())
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Padding(lines, (0, 0, 1, 1)))
    svg = console.export_svg(title="mpidl", code_format=TERMINAL, font_aspect_ratio=0.6)
    (PICTURES / f"{name}.svg").write_text(svg)


# A terminal without fonts from the internet.
TERMINAL = """<svg class="terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
<rect x="{terminal_x}" y="0" width="{terminal_width}" height="{height}" rx="8" fill="#1f2329"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def new_figure(width, height, dpi=100):
    from mpidl.report.plots import new_figure as figure

    picture = figure(width, height)
    picture.set_dpi(dpi)
    return picture


def save(figure, name, dpi=100):
    figure.savefig(PICTURES / f"{name}.png", dpi=dpi, bbox_inches="tight", facecolor="white")


def bar():
    """Draw the progress bar, as a terminal shows it in the middle of a run."""
    session = f"mpidl-pictures-{os.getpid()}"
    command = "mpirun -n 2 python -m mpidl.train --epochs 8 --out runs/bar"
    tmux = ("tmux", "-L", session)
    environment = os.environ | {"TERM": "xterm-256color", "PS1": "$ "}
    start = [*tmux, "-f", "/dev/null", "new-session", "-d", "-x", "92", "-y", "24", command]
    subprocess.run(start, cwd=work(), env=environment, check=True)
    screens, deadline = [], time.monotonic() + 120
    while time.monotonic() < deadline and (not screens or "Epoch: 5" not in screens[-1]):
        capture = subprocess.run(
            [*tmux, "capture-pane", "-e", "-p"], capture_output=True, text=True
        )
        if capture.returncode:
            break
        screens.append(capture.stdout)
        time.sleep(0.05)  # a picture a frame
    subprocess.run([*tmux, "kill-server"], check=True)
    terminal("bar", command, screens[-1].replace(str(work()) + "/", ""))


def verify():
    """Draw the hashes of the weights on several numbers of ranks."""
    words = ("python", "-m", "mpidl.verify", "--ranks", "1,2,3,4,7", "--max-iterations", "71")
    terminal("verify", " ".join(words), run(*words))


def network():
    """Draw the table of a network's layers."""
    words = ("python", "-m", "mpidl.info", "--network", "digits")
    terminal("network", " ".join(words), run(*words))


def progress():
    """Copy the curves of a run."""
    shutil.copy(trained() / "progress.png", PICTURES / "progress.png")


def digits():
    """Draw images of the embedded set."""
    images = dl.data.digits()
    figure = new_figure(7, 2.4)
    rows = 3
    for label in range(10):
        (indices,) = np.nonzero(images.labels == label)
        for row in range(rows):
            axes = figure.add_subplot(rows, 10, 10 * row + label + 1)
            axes.imshow(images.read([indices[37 * row]])[0, 0], cmap="gray")
            axes.set_axis_off()
    save(figure, "digits")


def augmentation():
    """Draw what a network sees of images that are augmented."""
    options = ("--rotation", 20, "--translate", 4, "--scale", "0.8,1.2")
    run(*TRAIN, *options, "--preview", PICTURES / "augmentation.png")


def confusion():
    """Draw what a network confuses that has seen only 20 images of each class."""
    train, test = dl.data.digits().split(0.9, seed=0)
    few = train.split(20 / 900, seed=0)[0]
    net = dl.nn.zoo.digits(few.image_shape, 10, seed=0)
    options = dl.TrainingOptions(epochs=40, batch_size=32, plots="none", verbose="off")
    dl.train(net, few, options)
    dl.evaluate(net, test, confusion=True).confusion.save(PICTURES / "confusion.png")


def predictions():
    """Draw test images with their predicted classes and scores."""
    _, test = dl.data.digits().split(0.9, seed=0)
    net = dl.load_model(trained() / "model.h5")[0]
    indices = np.linspace(0, len(test) - 1, 10).astype(int)
    pixels = test.read(indices)
    scores = dl.predict(net, pixels)
    figure = new_figure(9, 1.5)
    for i, (image, row) in enumerate(zip(pixels, scores, strict=True)):
        axes = figure.add_subplot(1, len(indices), i + 1)
        axes.imshow(image[0], cmap="gray")
        axes.set_title(f"{test.classes[row.argmax()]}: {100 * row.max():.1f} %", fontsize=9)
        axes.set_axis_off()
    save(figure, "predictions")


def activations():
    """Draw the outputs of the first convolution for one image."""
    _, test = dl.data.digits().split(0.9, seed=0)
    net = dl.load_model(trained() / "model.h5")[0]
    image = test.read([777])
    maps = dl.activations(net, image, "relu1")[0]
    figure = new_figure(8, 1.8)
    for i, pixels in enumerate([image[0, 0], *maps[:9]]):
        axes = figure.add_subplot(1, 10, i + 1)
        axes.imshow(pixels, cmap="gray" if i == 0 else "magma")
        axes.set_title("image" if i == 0 else f"channel {i}", fontsize=8)
        axes.set_axis_off()
    save(figure, "activations")


def blocks():
    """Draw a mini-batch in blocks of 16 images, divided among 1, 2 and 3 ranks."""
    figure = new_figure(8, 2.3)
    axes = figure.add_subplot()
    count = 7
    for row, ranks in enumerate((1, 2, 3)):
        for block in range(count):
            rank = next(r for r in range(ranks) if block < share_ends(count, ranks)[r])
            width = 10 / 16 if block == count - 1 else 1  # the last block has 10 images
            place = (block, -row)
            axes.barh(place[1], 0.94, left=block, height=0.62, color="#e9ecf1")
            axes.barh(place[1], 0.94 * width, left=block, height=0.62, color=RANK_COLOURS[rank])
            images = 10 if block == count - 1 else 16
            axes.text(block + 0.3, -row, f"{images}", color="white", va="center", fontsize=9)
        axes.text(-0.15, -row, f"{ranks} rank{'s' * (ranks > 1)}", ha="right", va="center")
    axes.set_title("A mini-batch of 106 images: whole blocks of 16 for each rank", fontsize=10)
    axes.set_axis_off()
    save(figure, "blocks")


def share_ends(count, ranks):
    """Return the block after the last one of each rank: the remainder goes to the first ranks."""
    return np.cumsum([count // ranks + (rank < count % ranks) for rank in range(ranks)])


def fold():
    """Draw the tree that adds up seven blocks, coloured by the rank that combines the nodes."""
    figure = new_figure(8, 3.6)
    axes = figure.add_subplot()
    ends = share_ends(7, 3)

    def draw(first, stop):
        """Draw the node of the blocks from first to stop, and return its place and rank."""
        ranks = {int(np.searchsorted(ends, block, side="right")) for block in range(first, stop)}
        colour = RANK_COLOURS[ranks.pop()] if len(ranks) == 1 else GRAY
        if stop - first == 1:
            place = (first, 0)
        else:
            middle = first + 2 ** ((stop - first - 1).bit_length() - 1)
            places = [draw(first, middle), draw(middle, stop)]
            place = (np.mean([x for x, _ in places]), max(y for _, y in places) + 1)
            for x, y in places:
                axes.plot([place[0], x], [place[1], y], color="#b8bec8", zorder=1)
        axes.scatter(*place, s=620, color=colour, zorder=2)
        name = f"{first}" if stop - first == 1 else f"{first}–{stop - 1}"
        axes.text(*place, name, color="white", ha="center", va="center", fontsize=9)
        return place

    draw(0, 7)
    for rank, colour in enumerate(RANK_COLOURS):
        axes.scatter([], [], s=90, color=colour, label=f"rank {rank}")
    axes.scatter([], [], s=90, color=GRAY, label="several ranks: sent")
    axes.legend(loc="upper left", frameon=False)
    axes.set_title("One tree for any number of ranks: the blocks 0 to 6 on 3 ranks", fontsize=10)
    axes.set_axis_off()
    axes.margins(0.12)
    save(figure, "fold")


def distances(world, iterations):
    """Train on the world's ranks and return the weights after each iteration, as one array each."""
    images = dl.data.digits(world).split(0.9, seed=0)[0]
    net = dl.nn.zoo.digits(images.image_shape, 10, seed=0)
    queue = dl.MinibatchQueue(images, 128, seed=0, world=world)
    sgdm = dl.SGDM(0.01, 0.9)

    def model_loss(net, pixels, labels):
        return dl.softmax_cross_entropy(net(pixels), labels)

    step, weights = dl.value_and_grad(model_loss, reduce=world), []
    for pixels, labels in queue.epoch(1):
        _, gradients, net.state = step(net, pixels, labels)
        net.parameters = sgdm(net.parameters, gradients)
        weights.append(np.concatenate([w.ravel() for w in net.parameters.values()]))
        if len(weights) == iterations:
            return np.array(weights)


def plain_distances(world, iterations):
    """Do the same with sums in the order of MPI's Allreduce, as other libraries do."""
    return distances(dl.World(plain=True), iterations)


def promise():
    """Draw how far weights on several ranks are from those on one rank."""
    iterations = 60
    figure = new_figure(8, 3)
    axes = figure.add_subplot()
    for function, colour, title in (
        (plain_distances, GRAY, "sums by MPI_Allreduce"),
        (distances, BLUE, "mpidl"),
    ):
        base = dl.launch(function, iterations, ranks=1)
        for ranks in (2, 3, 4):
            weights = dl.launch(function, iterations, ranks=ranks)
            largest = np.abs(weights.astype(np.float64) - base).max(axis=1)
            print(f"promise: {title}, {ranks} ranks: {largest[-1]:.2e}")
            style = {"color": colour, "alpha": 0.5 + 0.25 * (ranks - 2)}
            label = f"{title}, 2, 3, 4 ranks" if ranks == 2 else None
            axes.plot(np.arange(1, iterations + 1), largest, label=label, lw=2, **style)
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.set_yticks([0, 1e-8, 1e-6, 1e-4, 1e-2])
    axes.set(xlabel="iteration", title="Largest difference of a weight from the run on one rank")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "promise")


MAKERS = {
    maker.__name__: maker
    for maker in (
        *(bar, verify, network, progress, digits, augmentation, confusion, predictions),
        *(activations, blocks, fold, promise),
    )
}


def main(names):
    unknown = [name for name in names if name not in MAKERS]
    if unknown:
        print(f"no picture {unknown[0]}: expected one of {', '.join(MAKERS)}", file=sys.stderr)
        return 2
    PICTURES.mkdir(exist_ok=True)
    for name in names or MAKERS:
        MAKERS[name]()
        (path,) = PICTURES.glob(f"{name}.*")
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
