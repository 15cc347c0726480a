"""Pure functions: one equation each, tensors in and tensors out."""
