"""Checks before a first run: what Slurm, this host, and the nodes of a short job mean for it. Nothing is changed."""
