"""Train many models at once: trials of a file or of a function, on groups of ranks."""
