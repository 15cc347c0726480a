"""TF_CONFIG templates and launchers."""
