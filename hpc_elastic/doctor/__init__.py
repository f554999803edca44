"""Checks before a first run: what Slurm, this host, and the nodes of a short job mean for it. Nothing is changed.

`findings` is the type of a result, `saved` keeps it. `slurm_checks` and `allocation_checks` judge what Slurm shows;
`files`, `job`, `network` and `software` hold a probe of the nodes each, with the judge of its facts.
"""
