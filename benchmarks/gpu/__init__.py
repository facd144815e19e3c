"""Checks and measurements on a GPU: `run/gpu-check` (`check`) and `python -m benchmarks gpu`.

Each stage of the check is a separate process (`stage`), because an error on a GPU ends the
process that it happens in. Functions take the World and the Device that they compute on, so tests
run them on an emulated one.
"""
