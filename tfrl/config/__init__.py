"""Settings that several algorithms share, with their checks."""
