"""The batch side of a run, from sbatch to the requeue. The way of an attempt: ::

    submit_job      the run directory, the script, sbatch
    batch           what the script exec's on the batch host
    run_attempt     claims the attempt's directory; `supersede` ends earlier attempts that still run
    supervisor      the loop: `agents` on all nodes, what `signals` mean, what Slurm knows of the job (`job_watch`)
    conclude        the attempt's end: result.json, bad nodes, report
    requeue         whether there is another attempt, and how; `requeue_job` has it queued

That happens at a `site.Site`, with its launcher of agents: `slurm_site`, `step` (in the user's srun step), or `local`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NoReturn


class _Package(ModuleType):
    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "hpc_elastic.launch is no longer a function: "
            "use ElasticExecutor(folder, cluster='local') of hpc_elastic.submission"
        )


sys.modules[__name__].__class__ = _Package
