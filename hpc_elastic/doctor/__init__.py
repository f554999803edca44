"""Checks before a first run: what Slurm, this host's files and the installation mean for it. Nothing is changed.

`findings` is the type of a result and how it is kept, `slurm_checks` judges what Slurm prints, `host_checks` what this
host shows; `examine` asks them all.
"""
