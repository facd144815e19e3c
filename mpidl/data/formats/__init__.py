"""File formats: a module for each that `--data` reads."""
