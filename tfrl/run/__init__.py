"""A run: its loop, folder, checkpoints, metrics and results; and its one source of random numbers."""
