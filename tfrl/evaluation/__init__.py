"""Plays episodes with a policy that a run left."""
