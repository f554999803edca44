"""The run directory: its paths, the records and events in it by type, and the index of runs."""
