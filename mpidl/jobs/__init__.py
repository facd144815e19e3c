"""Start ranks: for a notebook, a command or a benchmark, and again after a job has died."""
