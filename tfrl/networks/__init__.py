"""Networks on a torso of the zoo, their action distributions, and their weights as files."""
