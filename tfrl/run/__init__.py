"""A run as files: its folder, checkpoints, metrics, results; and its one source of random numbers."""
