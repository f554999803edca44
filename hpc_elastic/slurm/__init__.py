"""Slurm: facts from its environment, command lines for it, its output parsed, and a client that runs them."""
