"""Rehearsals: a run with planted faults, which show whether the script really continues where it was.

`faults` is the catalogue. `journal` reads the steps that the workers report, `saves` the files that they write. An
`injector` reaches the processes of one machine, or those of a job's node. `live_run` is one run on this machine,
`slurm_run` one as a job. `fault_schedule` injects one fault after the other, `judge` attributes their effects,
`rehearse` is the whole, `tables` shows it.
"""
