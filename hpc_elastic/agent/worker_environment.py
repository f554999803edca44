"""The environment of a worker: what torchrun gives, and a few documented variables of ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from hpc_elastic.rendezvous.ranks import RankLayout
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.slurm.job_environment import in_job
from hpc_elastic.worker_api.agent_store import STORE_VARIABLE
from hpc_elastic.workers.spawn import EnvironmentChange
from hpc_elastic.workers.tree import TAG_VARIABLE


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """Fields of `RunSpec`, where an agent has none."""

    run_id: str
    role: str
    max_restarts: int
    virtual_local_rank: bool = False
    wandb: bool = False


class RoundFacts(Struct, frozen=True, kw_only=True):
    spec: RunSpec | WorkerSettings
    layout: RankLayout
    round: int
    master_addr: str
    master_port: int
    agent_store: bool
    """A TCPStore of ours serves at the master address; otherwise rank 0 opens it."""
    run_dir: str
    attempt: int
    tag: str


def round_facts(
    record: RoundRecord, layout: RankLayout, *, spec: RunSpec, run_dir: str, attempt: int, tag: str
) -> RoundFacts:
    address, port, serves = record.master.split(" ")
    return RoundFacts(
        spec=spec,
        layout=layout,
        round=record.round,
        master_addr=address,
        master_port=int(port),
        agent_store=serves == "1",
        run_dir=run_dir,
        attempt=attempt,
        tag=tag,
    )


def worker_command(spec: RunSpec, change: EnvironmentChange) -> list[str]:
    """The Python is the one that ``--setup`` has put first on PATH, where none was asked for."""
    return [*spec.worker_prefix, *change.command(spec.entrypoint.argv())]


def worker_environment(
    base: Mapping[str, str], facts: RoundFacts, *, local_rank: int, error_file: str
) -> dict[str, str]:
    """The whole environment of one worker.

    torch's ``@record``, or this package's, writes to `error_file`: never the one that the agent itself was given.
    """
    layout, spec = facts.layout, facts.spec
    rank = layout.first_rank + local_rank
    env = dict(base)
    env.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(layout.world_size),
            "LOCAL_WORLD_SIZE": str(layout.local_world_size),
            "GROUP_RANK": str(layout.group_rank),
            "GROUP_WORLD_SIZE": str(layout.group_world_size),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(layout.world_size),
            "ROLE_NAME": spec.role,
            "MASTER_ADDR": facts.master_addr,
            "MASTER_PORT": str(facts.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(facts.round),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(facts.agent_store),
            "TORCHELASTIC_ERROR_FILE": error_file,
            "HPC_ELASTIC_RUN_DIR": facts.run_dir,
            "HPC_ELASTIC_ATTEMPT": str(facts.attempt),
            TAG_VARIABLE: facts.tag,
            STORE_VARIABLE: f"{spec.run_id} {facts.master_addr} {facts.master_port}",
        }
    )
    if spec.virtual_local_rank:
        # As torchrun 2.13: through the devices that the agent sees, where these are limited.
        visible = [entry.strip() for entry in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
        own = visible[local_rank : local_rank + 1] if visible else [str(local_rank)]
        env.update({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ",".join(own)})
    if spec.wandb:
        # Two processes can't write the same run: most scripts have rank 0 alone log.
        env.setdefault("WANDB_RUN_ID", spec.run_id if rank == 0 else f"{spec.run_id}-rank{rank}")
        env.setdefault("WANDB_RESUME", "allow")
    if in_job(base):
        _set_slurm_variables(env, layout, local_rank)
    # torchrun's default; torch's own, without it, is another.
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # A segmentation fault, and a SIGABRT from the agent, leave the Python stacks of all threads on stderr.
    env.setdefault("PYTHONFAULTHANDLER", "1")
    if layout.local_world_size > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def shared_environment(
    base: Mapping[str, str], *, spec: RunSpec, local_world_size: int, run_dir: str, attempt: int, tag: str
) -> tuple[dict[str, str], frozenset[str]]:
    """Returns the names of the variables that differ between workers or rounds, too."""
    environments = []
    for number in (1, 2):  # two workers that have nothing in common that workers need not have
        layout = RankLayout(
            group_rank=number,
            group_world_size=10 + number,
            first_rank=100 * number,
            local_world_size=local_world_size,
            world_size=1000 + number,
        )
        facts = RoundFacts(
            spec=spec,
            layout=layout,
            round=number,
            master_addr=f"10.0.0.{number}",
            master_port=number,
            agent_store=number == 1,
            run_dir=run_dir,
            attempt=attempt,
            tag=tag,
        )
        environments.append(worker_environment(base, facts, local_rank=number, error_file=str(number)))
    one, other = environments
    shared = {name: value for name, value in one.items() if other.get(name) == value}
    return shared, frozenset(one.keys() | other.keys()) - shared.keys()


# Of the step that started the agents: no task of it is a worker.
_AGENTS_OWN = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_GTIDS")


def _set_slurm_variables(env: dict[str, str], layout: RankLayout, local_rank: int) -> None:
    """Slurm's variables as srun would set them had it started each worker as a task.

    To Slurm, the agents are the tasks: one on each node. A library or script that asks Slurm for its rank (Lightning's
    SLURMEnvironment, `int(os.environ["SLURM_PROCID"])`) would have all workers of a node think that they are the same
    one, and take the number of nodes for the world size; after a lost node, that of a node that is gone.
    """
    for name in _AGENTS_OWN:
        env.pop(name, None)
    env.update(
        {
            "SLURM_NTASKS": str(layout.world_size),
            "SLURM_NPROCS": str(layout.world_size),
            "SLURM_NNODES": str(layout.group_world_size),
            "SLURM_NTASKS_PER_NODE": str(layout.local_world_size),
            "SLURM_PROCID": str(layout.first_rank + local_rank),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_NODEID": str(layout.group_rank),
        }
    )
