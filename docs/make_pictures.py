"""Draw most pictures of the documentation, with the commands and functions that users run.

    python docs/make_pictures.py             # all these pictures, to docs/pictures
    python docs/make_pictures.py NAME ...    # only the named pictures

Terminal pictures need tmux, the report needs Chromium, and the others need `pip install
'.[plots]'`. docs/run_notebooks.py, docs/run_tutorial.py and docs/pictures_monitor.py draw the other
pictures. Pictures that show a speed are of a training on the 60,000 photographs of Fashion-MNIST
(`apt-get install dataset-fashion-mnist`). Trainings run in a temporary folder and take about 25
minutes in all. `bar`, `scaling` and `report` need an otherwise idle machine.
"""

import functools
import io
import os
import re
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
# A workload with classes that are sometimes confused, and a network large enough to scale.
PHOTOGRAPHS = "/usr/share/datasets/fashion-mnist"
WORKLOAD = ("--network", "fashion", "--data", PHOTOGRAPHS, "--epochs", "7")
VALIDATION = ("--validation-data", "test", "--validation-frequency", "0")


@functools.cache
def work():
    """Return a temporary folder that is removed when the program ends."""
    folder = Path(tempfile.mkdtemp(prefix="mpidl-pictures-"))
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def run(*command):
    """Run a command in the temporary folder, and return its output."""
    result = subprocess.run(
        [str(word) for word in command], cwd=work(), capture_output=True, text=True
    )
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {result.returncode}\n{result.stderr}")
    return result.stdout


@functools.cache
def trained(name, *options):
    """Train on two ranks with these options, and return the folder of the run."""
    run("mpirun", "-n", 2, *TRAIN, *options, "--out", f"runs/{name}", "--verbose", "off")
    return work() / "runs" / name


def terminal(name, command, text):
    """Write an SVG file that shows a terminal with a command and its output with ANSI colours."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    if "warning:" in text:
        sys.exit(f"{name}: expected output without warnings, found:\n{text}")
    prompt = Text("$ ", style="bold green") + Text(command, style="bold")
    lines = Text("\n").join([prompt, Text.from_ansi(text.rstrip("\n"))])
    width = 3 + max(len(line) for line in lines.plain.splitlines())
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Padding(lines, (0, 0, 1, 1)))
    svg = console.export_svg(title="mpidl", code_format=TERMINAL, font_aspect_ratio=0.6)
    (PICTURES / f"{name}.svg").write_text(svg)


# An SVG template of a terminal that does not load fonts from the internet.
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
    """Draw a terminal with the progress bar in the middle of a run."""
    session = f"mpidl-pictures-{os.getpid()}"
    command = " ".join(("mpirun -n 2 python -m mpidl.train", *WORKLOAD, "--out runs/bar"))
    tmux = ("tmux", "-L", session)
    environment = os.environ | {"TERM": "xterm-256color", "PS1": "$ "}
    start = [*tmux, "-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "24", command]
    subprocess.run(start, cwd=work(), env=environment, check=True)
    done, screen = 0, ""  # iterations of the bar since the row of epoch 3
    while done < 200:
        time.sleep(0.05)
        capture = [*tmux, "capture-pane", "-e", "-p"]
        screen = subprocess.run(capture, capture_output=True, text=True).stdout
        if not screen:
            sys.exit(f"bar: {command}: ended before the middle of epoch 4")
        text = re.sub(r"\x1b\[[\d;]*m", "", screen)
        row, now = re.search(r"^ +3 +(\d+) ", text, re.M), re.search(r" (\d+)/\d+ +loss", text)
        done = int(now[1]) - int(row[1]) if row and now else 0
    subprocess.run([*tmux, "kill-server"], capture_output=True)
    terminal("bar", command, screen.replace(str(work()) + "/", ""))


def verify():
    """Draw the hashes of the weights on several numbers of ranks."""
    words = ("python", "-m", "mpidl.verify", "--ranks", "1,2,3,4,7", "--max-iterations", "71")
    terminal("verify", " ".join(words), run(*words))


def network():
    """Draw the table of a network's layers."""
    words = ("python", "-m", "mpidl.info", "--network", "digits")
    terminal("network", " ".join(words), run(*words))


def scaling():
    """Copy the figures of a study on one and two ranks, with a prediction."""
    options = ("--ranks", "1,2", "--repeat", 2, "--predict", "1,2,4,8,16", *WORKLOAD)
    options += ("--epochs", 3, "--batch-size", 512)
    run("python", "-m", "mpidl.scaling", *options, "--out", "study")
    shutil.copy(work() / "study" / "scaling.png", PICTURES / "scaling.png")


def report():
    """Draw the top of a report about a run, as shown by Chromium."""
    folder, path = trained("fashion", *WORKLOAD, *VALIDATION), PICTURES / "report.png"
    run("python", "-m", "mpidl.report", folder.relative_to(work()), "--html", "report.html")
    words = ("--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,960")
    run("chromium", *words, f"--screenshot={path}", (work() / "report.html").as_uri())


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


def activations():
    """Draw the outputs of the first convolution for one image."""
    _, test = dl.data.digits().split(0.9, seed=0)
    net = dl.load_model(trained("digits", "--epochs", 5) / "model.h5")[0]
    image = test.read([777])
    maps = dl.activations(net, image, "relu1")[0]
    figure = new_figure(8, 1.8)
    for i, pixels in enumerate([image[0, 0], *maps[:9]]):
        axes = figure.add_subplot(1, 10, i + 1)
        axes.imshow(pixels, cmap="gray" if i == 0 else "magma")
        axes.set_title("image" if i == 0 else f"channel {i}", fontsize=8)
        axes.set_axis_off()
    save(figure, "activations")


def explain():
    """Draw maps of four photographs by each method, and of a network with random weights."""
    from mpidl.explanations.pictures import overlay

    words = ("--network", "digits", "--data", PHOTOGRAPHS, "--epochs", 3)
    net = dl.load_model(trained("explain", *words) / "model.h5")[0]
    random = dl.nn.zoo.digits(net.input_shape, len(net.classes), seed=1)
    random.normalization = net.normalization
    test = dl.data.open_data(PHOTOGRAPHS)[1]
    correct = np.nonzero(dl.classify(net, test) == test.labels)[0]
    indices = [next(i for i in correct if test.labels[i] == label) for label in (7, 8, 2, 9)]
    images = test.subset(indices)
    columns = {"image": images.read(range(len(indices)))}
    for title, (network, method) in {
        "Grad-CAM": (net, "grad-cam"),
        "occlusion": (net, "occlusion"),
        "gradient × pixel": (net, "gradient"),
        "integrated gradients": (net, "integrated-gradients"),
        "…, random weights": (random, "integrated-gradients"),
    }.items():
        maps = dl.explain(network, images, method=method, target="true").maps
        columns[title] = [
            overlay(image, values, method != "grad-cam")
            for image, values in zip(columns["image"], maps, strict=True)
        ]
    figure = new_figure(8.4, 5.8)
    for column, (title, drawn) in enumerate(columns.items()):
        for row, pixels in enumerate(drawn):
            axes = figure.add_subplot(len(indices), len(columns), row * len(columns) + column + 1)
            axes.imshow(pixels if column else pixels[0], cmap="gray")
            axes.set_title(title if row == 0 else "", fontsize=9)
            axes.set_axis_off()
    save(figure, "explain")


def blocks():
    """Draw a mini-batch as blocks of 16 images, divided among 1, 2 and 3 ranks."""
    figure = new_figure(8, 2.3)
    axes = figure.add_subplot()
    count = 7
    for row, ranks in enumerate((1, 2, 3)):
        for block in range(count):
            rank = next(r for r in range(ranks) if block < share_ends(count, ranks)[r])
            width = 10 / 16 if block == count - 1 else 1  # the last block has 10 images
            axes.barh(-row, 0.94, left=block, height=0.62, color="#e9ecf1")
            axes.barh(-row, 0.94 * width, left=block, height=0.62, color=RANK_COLOURS[rank])
            middle, images = block + 0.47 * width, f"{16 * width:.0f}"
            axes.text(middle, -row, images, color="white", ha="center", va="center", fontsize=9)
        axes.text(-0.15, -row, f"{ranks} rank{'s' * (ranks > 1)}", ha="right", va="center")
    axes.set_title("A mini-batch of 106 images: whole blocks of 16 for each rank", fontsize=10)
    axes.set_axis_off()
    save(figure, "blocks")


def share_ends(count, ranks):
    """Return the end of each rank's run of blocks. The first ranks get the remaining blocks."""
    return np.cumsum([count // ranks + (rank < count % ranks) for rank in range(ranks)])


def fold():
    """Draw the tree that adds up seven blocks, coloured by rank, with rings around sent nodes."""
    figure = new_figure(8, 4.2)
    axes = figure.add_subplot()
    ends = share_ends(7, 3)

    def draw(first, stop, is_below_gray):
        """Draw the node of the blocks `first` to ``stop - 1``, and return its position."""
        ranks = {int(np.searchsorted(ends, block, side="right")) for block in range(first, stop)}
        is_gray = len(ranks) > 1
        if stop - first == 1:
            place = (first, 0)
        else:
            middle = first + 2 ** ((stop - first - 1).bit_length() - 1)
            places = [draw(first, middle, is_gray), draw(middle, stop, is_gray)]
            place = (np.mean([x for x, _ in places]), max(y for _, y in places) + 1)
            for x, y in places:
                axes.plot([place[0], x], [place[1], y], color="#b8bec8", zorder=1)
        axes.scatter(*place, s=620, color=GRAY if is_gray else RANK_COLOURS[ranks.pop()], zorder=2)
        if is_below_gray and not is_gray:
            axes.scatter(*place, s=880, facecolors="none", edgecolors="black", zorder=2)
        name = f"{first}" if stop - first == 1 else f"{first}–{stop - 1}"
        axes.text(*place, name, color="white", ha="center", va="center", fontsize=9)
        return place

    draw(0, 7, is_below_gray=False)
    for rank, colour in enumerate(RANK_COLOURS):
        axes.scatter([], [], s=90, color=colour, label=f"rank {rank}")
    axes.scatter([], [], s=90, facecolors="none", edgecolors="black", label="sent to other ranks")
    axes.scatter([], [], s=90, color=GRAY, label="combined from several ranks")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.set_title("One tree for any number of ranks: the blocks 0 to 6 on 3 ranks", fontsize=10)
    axes.set_axis_off()
    axes.margins(0.12)
    save(figure, "fold")


def distances(world, iterations):
    """Train on the world's ranks. Return one array of all weights for each iteration."""
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
    """Return the same as `distances`, but sum with MPI_Allreduce as other libraries do."""
    return distances(dl.World(plain=True), iterations)


def promise():
    """Draw the differences between the weights on several ranks and on one rank."""
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
    axes.set(xlabel="iteration", ylabel="difference")
    axes.set_title("Largest difference of a weight from the run on one rank")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "promise")


def gallery():
    """Run the commands of docs/gallery.md, and store the pictures that the examples draw."""
    import run_tutorial
    from PIL import Image

    drawn, pictures = work() / "gallery", PICTURES / "gallery"
    drawn.mkdir()
    pictures.mkdir(exist_ok=True)
    run_tutorial.renew(DOCS / "gallery.md", drawn)
    for path in drawn.glob("*.png"):
        with Image.open(path) as picture:  # a palette needs a fraction of the bytes
            colours = picture.convert("RGB").quantize(method=Image.Quantize.FASTOCTREE)
        colours.save(pictures / path.name, optimize=True)


MAKERS = {
    maker.__name__: maker
    for maker in (
        bar,
        verify,
        network,
        digits,
        activations,
        explain,
        blocks,
        fold,
        promise,
        scaling,
        report,
        gallery,
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
        for path in sorted([*PICTURES.glob(f"{name}.*"), *PICTURES.glob(f"{name}/*")]):
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
