"""Test audits of jobs: of runs that were killed and resumed, on other numbers of ranks."""

import os
import signal

import jobs
import launcher
import pool
import pytest
from launcher import finish
from limits import wait_until

INTERVAL = 3  # iterations between states
STATE = '"kind": "certificate_state"'
CERTIFY = ["--certify", "--certify-every", INTERVAL, "--checkpoint-keep", 2 * INTERVAL]
# Augmentation, mixing, an average of the weights, and a choice of the network.
TRAINING = [
    *("--flip", "x", "--translate", 2, "--rotation", 10, "--mixup", 0.2),
    *("--shuffle", "every-epoch", "--average", "ema", "--solver", "adam"),
    *("--validation-fraction", 0.1, "--validation-frequency", 7),
    *("--output-network", "best-validation", "--threads", 1),
]


def audit(ranks, run, data, *words, check=0):
    """Audit a run, and return its lines without the seconds of the segments."""
    words = jobs.command("audit", run, "--threads", 1, *words, network=None, data=data)
    return jobs.output_lines(pool.run(ranks, *words, check=check))


def states_in(out):
    path = out / "metrics.jsonl"
    return path.read_text().count(STATE) if path.exists() else 0


def killed(job, rank, out, count):
    """Kill a rank of a job that has recorded `count` more states."""
    goal = states_in(out) + count
    wait_until(lambda: states_in(out) >= goal or job.poll() is not None)
    os.kill(job.rank_pids()[rank], signal.SIGKILL)
    assert finish(job).returncode not in (0, jobs.STOPPED)


def resumed(ranks, out):
    words = jobs.command("train", "--resume", out, network=None)
    return launcher.start(ranks, *words, env=jobs.without_plots())


def train_and_kill(ranks, data, out, *words, network=jobs.SMALL):
    """Train on ranks[0] ranks, kill the job, resume it on ranks[1] ranks and so on, to the end."""
    words = ["--batch-size", 50, "--checkpoint-every", 2, *TRAINING, *CERTIFY, *words]
    words = jobs.command("train", *words, *jobs.ENDLESS, network=network, data=data, out=out)
    with launcher.start(ranks[0], *words, env=jobs.without_plots()) as job:
        killed(job, ranks[0] - 1, out, 3)
    for count in ranks[1:-1]:
        with resumed(count, out) as job:
            killed(job, 0, out, 3)
    last = jobs.iterations(out)[-1] + 31
    jobs.resume(ranks[-1], out, "--max-iterations", last)
    return last


def assert_all_equal(lines):
    assert lines[-1].startswith("equal: nothing differs, "), lines
    assert not [line for line in lines if "DIFFERENT" in line]


@pytest.mark.slow("jobs")
@pytest.mark.timeout(600)
def test_the_network_fashion(tmp_path):
    """A run on 4 ranks in bfloat16 is killed twice, resumed on 2 and 3 ranks, audited on one."""
    data, out = jobs.draw_images(tmp_path / "set", side=28), tmp_path / "run"
    last = train_and_kill((4, 2, 3), data, out, "--precision", "bf16", network="fashion")
    lines = audit(1, out, data, "--sample", 5)
    assert_all_equal(lines)
    segments = [line.split()[1] for line in lines if line.startswith("iterations")]
    assert len(segments) in (5, 6) and segments[-1].endswith(f"-{last}"), lines


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((2, 3), ()),
        pytest.param((4, 2, 3), ("--precision", "bf16"), marks=pytest.mark.slow("jobs")),
        pytest.param((4, 2, 3), ("--accumulate", 2), marks=pytest.mark.slow("jobs")),
    ],
)
def test_a_run_that_was_killed_and_resumed(pictures, tmp_path, ranks, words):
    out = tmp_path / "run"
    last = train_and_kill(ranks, pictures, out, *words)
    lines = audit(1, out, pictures, "--sample", 5, "--seed", 3)
    assert_all_equal(lines)
    segments = [line.split()[1] for line in lines if line.startswith("iterations")]
    assert len(segments) in (5, 6) and segments[-1].endswith(f"-{last}"), lines
    lines = audit(3, out, pictures)
    assert_all_equal(lines)
    segments = [line.split()[1].split("-") for line in lines if line.startswith("iterations")]
    numbers = [[int(number) for number in pair] for pair in segments]
    assert numbers[0][0] == 0 and numbers[-1][1] == last
    assert all(a[1] == b[0] for a, b in zip(numbers, numbers[1:], strict=False))
    # A negative control: another augmentation.
    document = (out / "certificate.json").read_text()
    (out / "certificate.json").write_text(
        document.replace('"rotation": "10.0"', '"rotation": "9.0"')
    )
    lines = audit(2, out, pictures, "--steps", f"0:{INTERVAL}", check=1)
    assert lines[-1].startswith("DIFFERENT: certificate, options, iterations 0-"), lines


VALIDATION = "--validation-fraction 0.2 --validation-frequency 3"
BEST = f"{VALIDATION} --output-network best-validation"
# {name: (images, network, options)} of runs that the audit must accept.
RUNS = {
    "augmentation": (
        "colours",
        "small",
        "--flip xy --translate 2 --rotation 10 --scale 0.9,1.1 --shear 5 --brightness 0.2 "
        "--contrast 0.3 --saturation 0.2 --hue 0.1 --posterize 0.5 --erase 0.5 "
        "--resized-crop 20x20 --normalization zscore --test-flips x",
    ),
    "mixing in parts": (
        "pictures",
        "small",
        "--mixup 0.3 --cutmix 1 --mix-probability 0.7 --shuffle every-epoch --label-smoothing 0.1 "
        f"--accumulate 3 --partial-minibatch discard {BEST}",
    ),
    "balanced": (
        "pictures",
        "small",
        f"--sampling balanced --shuffle every-epoch --class-weights 1,2,0.5 {VALIDATION}",
    ),
    "weights of classes": (
        "pictures",
        "small",
        "--class-weights balanced --focal-gamma 2 --metrics all --fold 2/3",
    ),
    "lars": (
        "pictures",
        "small",
        "--solver lars --learn-rate-schedule cosine --warmup-epochs 1 --nesterov --average swa "
        "--average-use raw",
    ),
    "adamw": (
        "pictures",
        "small",
        "--solver adamw --gradient-threshold 0.1 --gradient-threshold-method global-l2norm "
        f"--average ema --average-every 2 --average-start 2 {BEST}",
    ),
    "patience": (
        "pictures",
        "small",
        f"{BEST} --validation-frequency 1 --validation-patience 1 --learning-rate 0.9 --epochs 9",
    ),
    "statistics": (
        "pictures",
        "small",
        f"--normalization zerocenter-element --random-crop 10x9 {BEST} --batchnorm-statistics "
        "moving",
    ),
    "conversion": (
        "pictures",
        "small",
        "--resize 14x15 --colour rgb --centre-crop 10x11 --validation-data test",
    ),
    "bfloat16": ("pictures", "varied", "--precision bf16 --epochs 2"),
    "winograd": ("pictures", "varied", "--winograd fast --epochs 2 --max-iterations 5"),
    "hardware": (
        "pictures",
        "small",
        "--worker-load measured --timeline 5 --tensorboard --workers 2 --prefetch 0 --cache-mb 1",
    ),
    "numbers": ("pairs/numbers.h5", "small", f"--loss mse {VALIDATION}"),
    "pixels": ("pairs/pixels.h5", "pixels", "--loss crossentropy+dice --class-weights balanced"),
    "labels": (
        "pairs/labels.h5",
        "small",
        f"--loss binary-crossentropy --positive-weights balanced --metrics all {VALIDATION}",
    ),
}


@pytest.mark.slow("wings")
@pytest.mark.parametrize("name", RUNS)
def test_runs_with_all_kinds_of_options(request, tmp_path, name):
    place, network, words = RUNS[name]
    fixture, _, file = place.partition("/")
    data, out = request.getfixturevalue(fixture), tmp_path / "run"
    data = data[file.removesuffix(".h5")] if file else data
    words = [
        "--epochs",
        3,
        "--certify",
        "--certify-every",
        2,
        "--checkpoint-keep",
        4,
        *words.split(),
    ]
    network = jobs.network(network)
    jobs.train(2, data, out, "--batch-size", 32, *words, "--threads", 1, network=network)
    for ranks, selection in ((1, ()), (3, ("--sample", 2)), (2, ("--steps", "2:3"))):
        assert_all_equal(audit(ranks, out, data, *selection))


@pytest.mark.slow("wings")
def test_a_run_that_has_skipped_images(pictures, tmp_path):
    data, out = tmp_path / "set", tmp_path / "run"
    launcher.shutil.copytree(pictures, data)
    for name in ("03", "04", "31", "32", "33", "34", "50", "51"):  # some of them in each set
        (data / "box" / f"{name}.png").write_bytes(b"no image")
    words = ["--on-bad-image", "skip", "--epochs", 2, *CERTIFY, *BEST.split()]
    jobs.train(2, data, out, *words, "--normalization", "zerocenter", "--threads", 1)
    lines = (out / "certificate-images.txt").read_text().splitlines()
    zeros = [i for i, line in enumerate(lines) if line == "0" * 64]
    headings = [i for i, line in enumerate(lines) if line.startswith("#")]
    assert len(zeros) == 8 and all(any(h < i for i in zeros) for h in headings)
    for ranks, selection in ((1, ()), (3, ("--sample", 2))):
        assert_all_equal(audit(ranks, out, data, *selection))


def test_a_signal_stops_an_audit(pictures, tmp_path):
    """A signal to one rank ends the audit on all ranks, without a verdict."""
    out = tmp_path / "run"
    jobs.train(1, pictures, out, "--batch-size", 5, "--epochs", 15, "--certify", "--threads", 1)
    words = jobs.command("audit", out, "--threads", 1, network=None, data=pictures)
    with launcher.start(2, *words, env=jobs.without_plots()) as job:
        for line in job.stdout:
            if line.startswith("initial weights"):
                break
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        result = finish(job)
    assert result.returncode == jobs.STOPPED
    assert "mpidl: SIGTERM: the audit was stopped" in jobs.error_lines(result)
    assert "DIFFERENT" not in result.stdout and "equal: " not in result.stdout
