"""How any command starts and ends: flags, settings, errors, output."""
