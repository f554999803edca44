"""Rehearsals: a run with planted faults, and whether the script really goes on where it was.

`faults` is the catalogue. `journal` reads what the workers report of their steps, `members` who they are, `saves` which
files they write. An `injector` reaches the processes of one machine, a `remote_injector` those of a job's node.
`live_run` is one run on this machine, `slurm_run` one as a job. `disturb` does one fault after the other to it, `judge`
finds what came of each and what does not hold, `rehearse` is the whole, `tables` shows it.
"""
