"""Measurements that take minutes to hours. Each prints its table; docs/results.md has what they gave."""
