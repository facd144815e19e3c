"""Data formats that `--data` accepts: one module per format. `path_formats` lists them."""
