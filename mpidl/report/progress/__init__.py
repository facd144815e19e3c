"""Show the progress of a run on a terminal, in a log and in a notebook."""
