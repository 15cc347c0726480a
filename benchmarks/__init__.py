"""Measurements that take minutes to hours. Each prints its table; docs/results.md has what they gave."""

import tfrl  # noqa: F401  before NumPy, which it keeps to one thread
