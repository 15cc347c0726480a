"""The training loops, and what a run does beside learning."""
