"""Networks: the model zoo."""
