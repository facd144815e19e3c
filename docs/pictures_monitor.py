"""Draw docs/pictures/monitor.png: the live page of a run on two ranks, in a headless Chromium.

    python docs/pictures_monitor.py

The program needs mpirun, Bokeh, selenium, Chromium and its driver, the photographs of
docs/make_pictures.py, and an otherwise idle machine.
The run takes place in a separate namespace, in which the host has the name NAME.
"""

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "monitor.png"
NAME = "node1"
RENAME = ("unshare", "--map-root-user", "--uts", "sh", "-c", f'hostname {NAME}; exec "$@"', "sh")
WIDTH, HEIGHT, COLOURS = 1280, 1240, 128
ITERATION = 2500  # the picture is taken after this iteration, in the middle of epoch 6


def monitor(path: Path = PICTURE) -> None:
    """Train on photographs, and write a picture of the page while the run continues."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]
    sys.path[:0] = [str(ROOT / "tests" / "launch")]
    import browser
    import launcher
    from make_pictures import VALIDATION, WORKLOAD

    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "mpidl.train", *WORKLOAD, *VALIDATION, "--verbose", "off", "--monitor"]
        words += ["--out", Path(folder) / "fashion"]
        command = [*RENAME, *launcher.command(2, *words)]
        streams = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        job = launcher.Job(command, env=launcher.environment(), **streams)
        with job, browser.chromium(WIDTH, HEIGHT) as driver:
            url = next(m[1] for m in (re.match(r"Monitor: (\S+)", x) for x in job.stdout) if m)
            browser.open_page(driver, url)
            browser.wait_until(lambda: _iteration(browser.text(driver, "run-0")) >= ITERATION)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(_with_few_colours(driver.get_screenshot_as_png()))
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def _iteration(text):
    match = re.search(r"iteration (\d+)/", text)
    return int(match[1]) if match else 0


def _with_few_colours(png):
    """Return the content of a smaller PNG file, with a palette of `COLOURS` colours."""
    from PIL import Image

    content = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(COLOURS).save(content, "PNG", optimize=True)
    return content.getvalue()


if __name__ == "__main__":
    monitor()
