"""Settings of the backends in this process. `backends.configure` changes them."""

winograd = "auto"
threads = 1
threads_chosen = False  # whether `configure` set `threads`
precision = "fp32"  # precision of multiply-adds on tensor cores: "fp32" (3xTF32) or "tf32"
direct = False  # whether convolutions on a GPU run without tensor cores
