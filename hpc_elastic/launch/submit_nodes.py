"""Which nodes a submission may have: whether they are enough, and whom it does without.

Left out are the user's own, and with ``--bad-nodes jobs`` those that earlier jobs of this account found bad.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from hpc_elastic.configuration.slurm_job import SlurmJob
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.bad_nodes import nodes_needed, settings_of
from hpc_elastic.node_records import account_evidence
from hpc_elastic.node_score import NodeScore, Scope, choose_excluded, score_nodes
from hpc_elastic.slurm.client import SlurmClient, why_not_without
from hpc_elastic.slurm.cluster_facts import PartitionNodes
from hpc_elastic.slurm.errors import SlurmError
from hpc_elastic.slurm.hostlist import HostlistError, compress, expand
from hpc_elastic.slurm.node_range import parse_nodes
from hpc_elastic.slurm.sbatch import SbatchOptions

Tell = Callable[[str], None]
"""Takes one line for the person who submits."""


def eligible_partitions(
    client: SlurmClient, options: SbatchOptions, env: Mapping[str, str]
) -> tuple[PartitionNodes, ...]:
    """The partitions that a job may run in.

    Returns:
        None at all where Slurm does not say, or where the job goes to another cluster, whose nodes are others.
    """
    elsewhere = any(argument.startswith(("-M", "--cluster")) for argument in options.extra)
    if elsewhere or env.get("SBATCH_CLUSTERS") or env.get("SLURM_CLUSTERS"):
        return ()
    names = options.partition or env.get("SBATCH_PARTITION")
    try:
        found = client.partitions(names)
    except SlurmError:
        return ()  # sbatch will say it better
    wanted = names.split(",") if names else []
    return tuple(part for part in found if (part.name in wanted if wanted else part.default))


def users_excluded(options: SbatchOptions, env: Mapping[str, str]) -> frozenset[str] | None:
    """The nodes that the user leaves out; None where that is no list: sbatch also takes a file's name."""
    given = [word.partition("=")[2] for word in options.extra if word.startswith("--exclude=")]
    try:
        return frozenset(expand((given or [options.exclude or env.get("SBATCH_EXCLUDE") or ""])[-1]))
    except HostlistError:
        return None


def check_node_count(job: SlurmJob, partitions: Sequence[PartitionNodes], users: Collection[str]) -> str | None:
    """Compare with what there is: 20.11, 22.05 and 26.05 accept more nodes than that, and the job pends for ever. Pure.

    Args:
        job: What is to be submitted.
        partitions: From `eligible_partitions`.
        users: From `users_excluded`.

    Returns:
        What the user should know, where the job has to wait.

    Raises:
        UsageError: no partition has so many.
    """
    least = parse_nodes(job.options.nodes or "1")[0]
    largest = max(partitions, key=lambda part: len(part.names.difference(users)), default=None)
    if largest is None:
        return None
    left, up = (len(names.difference(users)) for names in (largest.names, largest.usable_names))
    if left < least:
        spares = f" and {job.spec.spares} spare{'s' if job.spec.spares > 1 else ''}" if job.spec.spares else ""
        less = f", {largest.total - left} of them excluded" if left < largest.total else ""
        raise UsageError(
            f"{job.asked_nodes}{spares}: partition {largest.name} has {largest.total} nodes{less}; "
            "the job would wait for ever"
        )
    if up < least:
        those = " that are not excluded" if left < largest.total else ""
        return f"only {up} of the {left} nodes of partition {largest.name}{those} are up now"
    return None


def bad_nodes(
    client: SlurmClient,
    job: SlurmJob,
    partitions: Sequence[PartitionNodes],
    users: frozenset[str],
    env: Mapping[str, str],
    *,
    script: str,
    now_ns: int,
    tell: Tell,
) -> tuple[str, ...]:
    """Those that earlier jobs of this account found bad, as far as the job can do without them.

    Args:
        client: This cluster's.
        job: What is to be submitted.
        partitions: From `eligible_partitions`.
        users: From `users_excluded`.
        env: For the account's folder.
        script: The batch script, written.
        now_ns: The wall clock.
        tell: Hears of each that is left out, and of each that can't be.
    """
    if settings_of(job.spec).scope is not Scope.JOBS or not partitions:
        return ()
    try:
        bad = [score for score in _bad(client, job, env, now_ns=now_ns) if score.node not in users]
        chosen = _chosen(job, partitions, users, bad, tell)
        why = why_not_without(client, script, exclude_argument({*users, *chosen})) if chosen else None
    except (SlurmError, HostlistError):
        return ()
    if why is not None:
        tell(f"{compress(sorted(chosen))} would be left out, but then the job could not run: {why}")
        return ()
    for name, reason in chosen.items():
        tell(f"{name} is left out: {reason}")
    return tuple(sorted(chosen))


def exclude_argument(nodes: Collection[str]) -> str:
    """sbatch's ``--exclude``, which takes the place of the user's own: theirs have to be among them."""
    return f"--exclude={compress(sorted(nodes))}"


def _bad(client: SlurmClient, job: SlurmJob, env: Mapping[str, str], *, now_ns: int) -> list[NodeScore]:
    cluster = env.get("SLURM_CLUSTER_NAME") or client.config().cluster or ""
    hours = settings_of(job.spec).hours
    scores = score_nodes(account_evidence(env, cluster=cluster), now_ns=now_ns, hours=hours)
    return [score for score in scores if score.is_bad]


def _chosen(
    job: SlurmJob,
    partitions: Sequence[PartitionNodes],
    users: frozenset[str],
    bad: Sequence[NodeScore],
    tell: Tell,
) -> dict[str, str]:
    """Who is left out, and why."""
    exclusion = choose_excluded(
        bad,
        known=frozenset().union(*(part.names for part in partitions)),
        usable=frozenset().union(*(part.usable_names for part in partitions)) - users,
        need=nodes_needed(job.spec),
        required=expand(job.options.nodelist or ""),
        share=settings_of(job.spec).share,
    )
    reasons = {score.node: score.why for score in bad}
    for name, why in exclusion.spared:
        tell(f"{name} is bad ({reasons[name]}), and not left out: {why}")
    return {name: reasons[name] for name in exclusion.nodes}
