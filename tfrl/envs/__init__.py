"""Vectorised environments: `registry.make` gives any slice of a global vector, the same on every topology.

To add a family of envs: a module with a class that follows `tfrl.envs.spec.VecEnv`, and a `Family` in
`tfrl/envs/registry.py`.
"""
