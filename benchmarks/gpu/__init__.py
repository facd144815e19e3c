"""Check and measure on a GPU: `run/gpu-check` (`check`) and `python -m benchmarks gpu`.

Each stage of the check is a separate process (`stage`), because an error on a GPU ends the process
in which it occurs. Functions take the World and the Device as arguments, so tests can run them on
an emulated device.
"""
