"""Algorithms: one file each, with its settings, its losses and the order of its gradient steps."""
