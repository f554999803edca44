"""Rehearsals: a run with planted faults, and whether the script really goes on where it was.

`faults` is the catalogue, and makes of a seed what happens. `journal` reads what the workers report of their steps,
`members` who they are, `saves` sees when they write files. An `injector` reaches the processes of one machine, a
`remote_injector` those of a job's node. `live_run` is one run on this machine, `slurm_run` one as a job. `injections`
does the faults to it, `disturb` one after the other, `aftermath` is what came of each, `judge` finds what does not
hold, `rehearse` is the whole, `parts` measures the restarts, `tables` shows it all.
"""
