"""Algorithms, one file each, behind the protocols of `tfrl.agents.agent`."""
