"""The idea of mpidl in NumPy: blocks of images, the fold over them, and the tape. See README.md."""
