"""Evaluations: plays episodes with a policy, also with one of an earlier run."""
