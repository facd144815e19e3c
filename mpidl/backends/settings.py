"""Settings of this process, which `backends.configure` changes."""

winograd = "auto"
threads = 1
threads_chosen = False  # whether `configure` set `threads`
precision = "fp32"  # precision of multiply-adds on tensor cores: "fp32" (3xTF32) or "tf32"
direct = False  # whether convolutions on a GPU avoid the tensor cores
