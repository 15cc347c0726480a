"""Measurements that take minutes to hours. Each prints a table and JSON; docs/results.md has what they gave."""
