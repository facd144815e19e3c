"""The fixtures of devices, and `--device cuda`, which leaves out tests that use no device."""

from pathlib import Path

from gpu_devices import device, emulated, is_cuda

__all__ = ["device", "emulated"]


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=["emulated", "cuda"],
        default="emulated",
        help="where the kernels' tests compute (emulated)",
    )


def pytest_collection_modifyitems(config, items):
    if not is_cuda(config):
        return
    folder, used = Path(__file__).parent, {"device", "emulated"}
    hostside = [i for i in items if folder in i.path.parents and not used & set(i.fixturenames)]
    if hostside:
        config.hook.pytest_deselected(items=hostside)
        items[:] = [item for item in items if item not in hostside]
