"""Fault-tolerant, elastic PyTorch training on Slurm."""

__version__ = "0.1.0"
