"""Experience gathered by other processes, on Ray: the only folder that imports it."""
