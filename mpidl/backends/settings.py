"""Settings of this whole process; `backends.configure` sets them."""

winograd = "auto"
threads = 1
threads_chosen = False  # whether `configure` set `threads`
precision = "fp32"  # of products on a GPU's tensor cores: "fp32" (3xTF32) or "tf32"
direct = False  # whether a GPU convolves without tensor cores
