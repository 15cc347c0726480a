"""The learners of all algorithms, and the evaluations and other work beside training."""
