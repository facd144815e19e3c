"""Test the live page in a real browser with jobs of several ranks, and errors of the command."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time

import browser
import jobs
import launcher
import pool
import pytest
from browser import wait_until
from launcher import finish

from mpidl.report import stop_file
from mpidl.training.files import checkpoint

PAGES = pytest.mark.slow("pages")


def monitor(*words):
    """Return the one-line error of mpidl.monitor."""
    return jobs.refusal(pool.run(1, "-m", "mpidl.monitor", *words))


def test_bad_input_is_one_line(pictures, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("")
    assert "notes: expected a run's folder" in monitor(tmp_path / "notes")
    assert "a.txt: expected a run's folder, found a file" in monitor(tmp_path / "notes" / "a.txt")
    assert monitor() == "the following arguments are required: RUN"
    text = "--port must be a whole number from 0 to 65535, found "
    assert monitor("a", "--port", "65536") == f"{text}65536"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        expected = f"{port}: cannot listen: Address already in use; "
        assert monitor("a", "--port", port) == f"--port {expected}--port 0 takes a free port"
        out = tmp_path / "run"
        result = jobs.train(2, pictures, out, "--monitor", port, check=2)
        assert jobs.refusal(result) == f"--monitor {expected}--monitor 0 takes a free port"
        assert not out.exists()
    result = jobs.train(2, pictures, out, "--monitor", "all", check=2)
    assert jobs.refusal(result) == "--monitor must be a whole number from 0 to 65535, found all"
    words = ("-m", "mpidl.monitor", out)
    assert jobs.refusal(pool.run(2, *words)) == "monitor uses one process: run it without mpirun"


@pytest.mark.slow("pages")
def test_without_bokeh_the_option_names_the_extra(pictures, tmp_path):
    """If Bokeh is not installed, the error of --monitor names the extra to install.

    The script hides Bokeh from the search for packages.
    """
    script = tmp_path / "train.py"
    script.write_text(
        "import importlib.util, sys\n"
        "from mpidl.ranks import failure\n"
        "from mpidl.cli.train import main\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'bokeh' else find(name)\n"
        "failure.run(main)\n"
    )
    words = ("--data", pictures, "--network", jobs.SMALL, "--out", tmp_path / "run", "--monitor")
    text = jobs.refusal(launcher.mpirun(2, script, *words))
    assert text == "--monitor: expected the package bokeh: pip install 'mpidl[monitor]'"


def start(ranks, pictures, out, *options):
    """Start an endless training run with --monitor; return the job and the URL of its page."""
    words = ["--batch-size", 50, *jobs.ENDLESS, "--verbose", "off", "--monitor", *options]
    words = jobs.command("train", *words, network=jobs.SMALL, data=pictures, out=out)
    job = launcher.start(ranks, *words, env=jobs.without_plots() | {"RUN": out})
    for line in job.stdout:
        if match := re.match(r"Monitor: (\S+)", line):
            return job, match[1]
    pytest.fail(finish(job).stderr)


# JavaScript: the texts of the page and of Bokeh that tell of a lost connection or of the end.
BANNERS = """
const texts = [...document.querySelectorAll(".banner")].map(e => e.hidden ? "" : e.innerText);
for (const e of document.body.children)
  if (e.shadowRoot && /connect/i.test(e.shadowRoot.textContent)) texts.push("Bokeh's message");
return texts.filter(text => text);
"""
HAS_ENDED, IS_LOST = "The run has ended. The page shows the last state.", "The connection is lost. "


def page_processes(out):
    """Return the command lines of the processes that serve the page of a run."""
    return [line for line in launcher.marked(f"RUN={out}") if b"live.page_process" in line]


@PAGES
@pytest.mark.timeout(120)
def test_curves_move_and_the_button_stops_the_job(pictures, tmp_path):
    out = tmp_path / "run"
    job, url = start(2, pictures, out)
    with job, browser.chromium() as driver:
        browser.open_page(driver, url)
        wait_until(lambda: len(browser.columns(driver, "curves-0", "loss")[0]) > 8)
        wait_until(lambda: driver.execute_script("return document.title").startswith("0 % run"))
        canvas = browser.element(driver, "accuracy", "canvas")
        before, picture = browser.columns(driver, "curves-0", "loss")[0], canvas.screenshot_as_png
        wait_until(lambda: len(browser.columns(driver, "curves-0", "loss")[0]) > len(before))
        wait_until(lambda: canvas.screenshot_as_png != picture)
        assert re.match(
            r"runrunning on 2 ranks, .*epoch \d+/1000000", browser.text(driver, "run-0")
        )
        # The page does not change while a script runs, so both columns have equal lengths.
        points = browser.columns(driver, "curves-0", "x", "loss")
        recorded = {
            r["iteration"]: r["loss"] for r in jobs.metrics(out) if r["kind"] == "iteration"
        }
        if points[0][1] == 2:  # otherwise the points are means over several iterations
            assert [recorded[x] for x in points[0]] == pytest.approx(points[1], rel=1e-6)
        origin = url.partition("/?")[0]
        assert all(name.startswith(origin) for name in browser.requests(driver))
        assert browser.errors(driver) == []
        button = browser.element(driver, "now-0", "button")
        clicked = time.monotonic()
        button.click()
        result = finish(job)
        print(f"from the click to the end of the job: {time.monotonic() - clicked:.2f} s")
        wait_until(lambda: "stopped: stop file" in browser.text(driver, "run-0"))
        wait_until(lambda: driver.execute_script(BANNERS))
        assert driver.execute_script(BANNERS) == [HAS_ENDED]  # a stop is not shown as a fault
    assert result.returncode == jobs.STOPPED, result.stderr
    assert jobs.error_lines(result) == []
    last = result.stdout.splitlines()[-1]
    iteration = int(re.match(r"stop file: stopped at iteration (\d+), checkpoint written", last)[1])
    assert checkpoint.load(out)[1]["position"]["iteration"] == iteration
    end = ["--max-iterations", iteration + 5]
    jobs.resume(3, out, *end)
    expected = jobs.trained_hash(1, pictures, tmp_path / "reference", *jobs.ENDLESS, *end)
    assert jobs.weights_hash(out) == expected


@PAGES
@pytest.mark.timeout(120)
def test_the_other_button_stops_after_the_epoch(pictures, tmp_path):
    out = tmp_path / "run"
    job, url = start(2, pictures, out)
    with job, browser.chromium() as driver:
        browser.open_page(driver, url)
        browser.element(driver, "epoch-0", "button").click()
        result = finish(job)
        wait_until(lambda: driver.execute_script(BANNERS))
        assert driver.execute_script(BANNERS) == [HAS_ENDED]
    assert result.returncode == jobs.STOPPED, result.stderr
    position = checkpoint.load(out)[1]["position"]
    assert position["batch"] == 0 and position["iteration"] % jobs.ITERATIONS == 0
    end = ["--max-iterations", position["iteration"] + 2]
    jobs.resume(2, out, *end)
    expected = jobs.trained_hash(1, pictures, tmp_path / "reference", *jobs.ENDLESS, *end)
    assert jobs.weights_hash(out) == expected


LOOP = """
import sys
import time
import mpidl as dl

world, iteration = dl.World(), 0
with dl.report_to(sys.argv[1], world=world, epochs=1, iterations=10**6, monitor=0):
    while not world.stop_requested():
        iteration += 1
        world.report(epoch=1, iteration=iteration, loss=1 / iteration, accuracy=0.5)
        time.sleep(0.001)
print(world.rank, iteration, flush=True)
"""


@PAGES
@pytest.mark.timeout(120)
def test_the_button_stops_a_custom_loop(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    job = launcher.start(3, tmp_path / "loop.py", tmp_path / "run", env=jobs.without_plots())
    with job, browser.chromium() as driver:
        url = re.match(r"Monitor: (\S+)", job.stdout.readline())[1]
        browser.open_page(driver, url)
        wait_until(lambda: len(browser.columns(driver, "curves-0", "loss")[0]) > 8)
        assert "running on 3 ranks" in browser.text(driver, "run-0")
        browser.element(driver, "now-0", "button").click()
        result = finish(job)
        wait_until(lambda: "stopped: stop file" in browser.text(driver, "run-0"))
        wait_until(lambda: driver.execute_script(BANNERS) == [HAS_ENDED])
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines() if len(line.split()) == 2]
    assert sorted(rank for rank, _ in lines) == ["0", "1", "2"]
    assert {int(iteration) for _, iteration in lines} == {
        max(record["iteration"] for record in jobs.metrics(tmp_path / "run"))
    }


@PAGES
@pytest.mark.timeout(120)
def test_the_command_shows_several_runs(pictures, tmp_path):
    """A page shows a completed run, and a second run once its folder appears."""
    first, later = tmp_path / "first", tmp_path / "later"
    jobs.train(1, pictures, first, "--epochs", 1)
    words = ["-m", "mpidl.monitor", first, later, "--port", 0]
    with launcher.start(None, *words) as job, browser.chromium(width=800) as driver:
        url = re.match(r"Monitor: (\S+)", job.stdout.readline())[1]
        assert "ssh -N " in job.stdout.readline()
        browser.open_page(driver, url)
        wait_until(lambda: "firstdone, test accuracy" in browser.text(driver, "run-0"))
        assert f"waiting for {later}" in browser.text(driver, "run-1")
        assert len(browser.columns(driver, "curves-0", "x")[0]) == jobs.ITERATIONS
        assert browser.element(driver, "now-0", "button").get_attribute("disabled")
        jobs.train(1, pictures, later, "--epochs", 2)
        wait_until(lambda: len(browser.columns(driver, "curves-1", "x")[0]) == 2 * jobs.ITERATIONS)
        wait_until(lambda: "laterdone" in browser.text(driver, "run-1"))
        driver.execute_script(
            "arguments[0].click()", browser.element(driver, "axis", ".bk-btn:nth-child(2)")
        )
        wait_until(lambda: browser.columns(driver, "curves-1", "x")[0][-1] == 2.0)
        width = "return document.documentElement.scrollWidth"
        assert driver.execute_script(width) <= 800
        job.send_signal(signal.SIGINT)
        assert finish(job).returncode == 0


@contextlib.contextmanager
def forwarded(port, target):
    """Forward connections from a port to another port, and close them at the end of the block.

    Yield the port and a list of the requested paths.
    """
    sockets, paths = [socket.create_server(("127.0.0.1", port))], []

    def copy(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if data.startswith(b"GET "):
                    paths.append(data.split()[1].decode())
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                ends = [sockets[0].accept()[0], socket.create_connection(("127.0.0.1", target))]
                sockets.extend(ends)
                for pair in (ends, ends[::-1]):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield sockets[0].getsockname()[1], paths
    finally:
        for end in sockets:
            with contextlib.suppress(OSError):  # the other side has closed the connection
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@PAGES
@pytest.mark.timeout(120)
def test_a_page_continues_after_a_lost_connection(pictures, tmp_path):
    out, next_iteration = tmp_path / "run", jobs.ITERATIONS + 1
    jobs.train(1, pictures, out, "--epochs", 1)
    is_connected = "return document.getElementById('lost') && !document.querySelector(HIDDEN)"
    is_connected = is_connected.replace("HIDDEN", "'.banner:not([hidden])'")
    with launcher.start(None, "-m", "mpidl.monitor", out) as job, browser.chromium() as driver:
        url = re.match(r"Monitor: (\S+)", job.stdout.readline())[1]
        port = re.search(r":(\d+)/", url)[1]
        with forwarded(0, int(port)) as (way, _):
            browser.open_page(driver, url.replace(port, str(way)))
        wait_until(lambda: driver.execute_script(is_connected) is False)
        with open(out / "metrics.jsonl", "a") as file:
            record = {"kind": "iteration", "epoch": 2, "iteration": next_iteration, "loss": 0.5}
            file.write(json.dumps(record) + "\n")
        with forwarded(way, int(port)) as (_, paths):
            # Wait for the request first: a page that reloads would interrupt the driver's script,
            # and the driver would wait for it.
            wait_until(lambda: any(path.startswith("/ws?") for path in paths))
            wait_until(lambda: driver.execute_script(is_connected))
            browser.wait_for_page(driver)
            wait_until(lambda: len(browser.columns(driver, "curves-0", "x")[0]) == next_iteration)
        job.send_signal(signal.SIGINT)
        finish(job)


@PAGES
@pytest.mark.timeout(120)
def test_the_page_ends_with_a_job_that_is_killed(pictures, tmp_path):
    """A page that is open then shows an alarm."""
    out = tmp_path / "run"
    job, url = start(2, pictures, out)
    with job, browser.chromium() as driver:
        wait_until(lambda: len(page_processes(out)) == 1)
        browser.open_page(driver, url)
        for pid in job.rank_pids().values():
            os.kill(pid, signal.SIGKILL)
        finish(job)
        wait_until(lambda: not page_processes(out))
        wait_until(lambda: driver.execute_script(BANNERS))
        (banner,) = driver.execute_script(BANNERS)
        assert banner.startswith(IS_LOST)


@PAGES
def test_a_stop_file_stops_a_job_that_no_page_shows(pictures, tmp_path):
    out = tmp_path / "run"
    with jobs.start(2, pictures, out, *jobs.ENDLESS) as job:
        stop_file.request(out, stop_file.NOW)
        result = finish(job)
    assert result.returncode == jobs.STOPPED, result.stderr
    assert "stop file: stopped at iteration" in result.stdout.splitlines()[-1]
