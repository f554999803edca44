"""The run directory: its paths, what is written there and by which type, its events, the index of runs."""
