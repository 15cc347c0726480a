"""The start and the end of any command: flags, settings, errors, output."""
