"""What holds for this whole process: see `backends.configure`."""

winograd = "auto"
threads = 1
