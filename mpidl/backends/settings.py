"""Settings of the backends in this process. `backends.configure` changes them."""

winograd = "auto"
threads = 1
threads_chosen = False  # whether `configure` set `threads`
precision = "fp32"  # one of `backends.PRECISIONS` for the device
on_gpu = False  # whether this process computes on a GPU
direct = False  # whether convolutions on a GPU run without tensor cores
