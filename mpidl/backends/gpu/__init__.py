"""The GPU backend, by our CUDA kernels; `functions` is what `backends.of` gives for its arrays."""
