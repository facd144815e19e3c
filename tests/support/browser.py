"""Start a headless Chromium for tests of pages, and read Bokeh's models in the pages."""

import contextlib
import functools
import importlib.util
import shutil

import limits
import pytest

INSTALL = "apt-get install chromium chromium-driver; pip install selenium"
POLL_SECONDS, SECONDS = 0.1, 3600
wait_until = functools.partial(limits.wait_until, seconds=POLL_SECONDS)
# Finds the element that matches a CSS selector in a model's view, in any shadow root of the view.
FIND = """
const search = (root) => {
  const element = root.querySelector(arguments[1]);
  if (element) return element;
  for (const child of root.querySelectorAll("*")) {
    const inner = child.shadowRoot && search(child.shadowRoot);
    if (inner) return inner;
  }
  return null;
};
const model = Bokeh.documents[0].get_model_by_name(arguments[0]);
const view = model && Bokeh.index.find_one(model);
return view ? search(view.el.shadowRoot) : null;
"""


def missing():
    """Return the reason why no page can be tested here, or None."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return f"no Chromium with its driver: {INSTALL}"
    if importlib.util.find_spec("selenium") is None:
        return f"no selenium: {INSTALL}"
    return None


@contextlib.contextmanager
def chromium(width=1280, height=1400):
    """Start a headless Chromium and yield its selenium driver."""
    if reason := missing():
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(SECONDS)  # the test's limit ends a page that hangs
    driver.set_page_load_timeout(SECONDS)
    try:
        yield driver
    finally:
        driver.quit()


def open_page(driver, url):
    """Open a Bokeh page and wait until it is drawn."""
    driver.get(url)
    wait_for_page(driver)


def wait_for_page(driver):
    """Wait until a Bokeh page is drawn."""
    script = "return window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle"
    wait_until(lambda: driver.execute_script(script))


def element(driver, name, selector):
    """Wait for the element that matches a CSS selector in a model's view, and return it."""
    elements = []

    def is_there():
        elements[:] = filter(None, [driver.execute_script(FIND, name, selector)])
        return bool(elements)

    wait_until(is_there)
    return elements[0]


def columns(driver, name, *names):
    """Return columns of a data source as lists; NaN becomes None."""
    script = "const data = Bokeh.documents[0].get_model_by_name(arguments[0]).data;"
    script += "return arguments[1].map(name => Array.from(data[name] || []))"
    return driver.execute_script(script, name, list(names))


def text(driver, name):
    """Return the text of a Div."""
    script = "const html = Bokeh.documents[0].get_model_by_name(arguments[0]).text;"
    script += "return new DOMParser().parseFromString(html, 'text/html').body.textContent"
    return driver.execute_script(script, name)


def errors(driver):
    """Return the errors in the console of the page."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def requests(driver):
    """Return the URLs of everything that the page has loaded."""
    script = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    return driver.execute_script(script)
