"""Fixtures that open devices, and the option `--device cuda`, which selects tests with a device."""

from pathlib import Path

from gpu_devices import device, emulated, is_cuda

__all__ = ["device", "emulated"]


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=["emulated", "cuda"],
        default="emulated",
        help="device for the tests of kernels (default: emulated)",
    )


def pytest_collection_modifyitems(config, items):
    if not is_cuda(config):
        return
    folder, used = Path(__file__).parent, {"device", "emulated"}
    on_host = [i for i in items if folder in i.path.parents and not used & set(i.fixturenames)]
    if on_host:
        config.hook.pytest_deselected(items=on_host)
        items[:] = [item for item in items if item not in on_host]
