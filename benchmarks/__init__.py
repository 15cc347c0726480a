"""Measurements that take minutes to hours. Each prints its table; docs/notebook/ has the figures."""

import tfrl  # noqa: F401  before NumPy, which it keeps to one thread
