"""Settings: one file a section or algorithm, with ranges, presets and checks."""
