"""Vectorised environments: `registry.make` gives any slice of a global vector, the same on every topology.

CONTRIBUTING.md says how to add a family of envs.
"""
