"""Reads finished and running runs, and shows them."""
