"""Checks before a first run: what Slurm, this host, and the nodes of a short job mean for it. Nothing is changed.

`findings` is the type of a result, `saved` keeps it. `slurm_checks` judges the output of Slurm's commands; `files`,
`job`, `network` and `software` each hold a probe of the nodes, with the judge of its facts.
"""
