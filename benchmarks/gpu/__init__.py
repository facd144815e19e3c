"""What is checked and measured on a GPU: `run/gpu-check` (`check`), `python -m benchmarks gpu`.

A stage of the check is a process of its own (`stage`), since what goes wrong on a GPU ends the
process it goes wrong in. Its functions take the World and the Device they compute on, so that
tests run them on an emulated one.
"""
