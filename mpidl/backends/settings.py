"""What holds for this whole process: see `backends.configure`."""

winograd = "auto"
threads = 1
chosen = False  # whether somebody has said how many threads
