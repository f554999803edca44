"""A soak: minutes of random faults on a real training run on a real Slurm; see ``python -m tests.soak --help``.

The judge of the losses is that of `hpc_elastic.rehearsal`.
`injections` does faults to the rig, `trainer` is what is trained, `journal` reads what the trainer has noted,
`explain` looks each fault up in the run's own report, `soak` is the loop, `table` the result.
"""
