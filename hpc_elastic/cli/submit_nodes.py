"""Which nodes a submission does without: those that earlier jobs of this account found bad (``--bad-nodes jobs``)."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_elastic.cli.command_line import say
from hpc_elastic.launch.bad_nodes import nodes_needed, settings_of
from hpc_elastic.node_records import NodeRecord, account_evidence, save_record
from hpc_elastic.node_score import NodeScore, Scope, choose_excluded, score_nodes
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.run_spec import RunSpec
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.errors import SlurmError
from hpc_elastic.slurm.hostlist import HostlistError, compress, expand
from hpc_elastic.slurm.sbatch import SbatchOptions


def exclude_arguments(
    client: SlurmClient,
    paths: RunPaths,
    spec: RunSpec,
    options: SbatchOptions,
    env: Mapping[str, str],
    *,
    now_ns: int,
) -> list[str]:
    """sbatch's ``--exclude`` with the user's own nodes and the bad ones; empty where nothing is to be added.

    It is said whom it leaves out, and kept in the run's nodes.json, so that a requeue can let them in again.

    Args:
        client: This cluster's.
        paths: The run's, with its script written.
        spec: The run.
        options: What the script asks for.
        env: For the account's folder and sbatch's own variables.
        now_ns: The wall clock.

    Raises:
        OSError: nodes.json can't be written.
    """
    if settings_of(spec).scope is not Scope.JOBS or _goes_elsewhere(options, env):
        return []
    try:
        users = expand(_listed(options, env))
        chosen, scores = _choose(client, spec, options, env, frozenset(users), now_ns=now_ns)
        argument = f"--exclude={compress(sorted({*users, *chosen}))}"
        if not chosen:
            return []
        why = client.would_run(str(paths.script), extra=[argument])
    except (SlurmError, HostlistError):
        return []  # a list in a file, say: then it is left to sbatch
    if why is not None:
        say(f"{compress(chosen)} would be left out, but then the job could not run: {why}")
        return []
    save_record(paths.nodes_json, NodeRecord(excluded=chosen, saved_ns=now_ns))
    for score in scores:
        if score.node in chosen:
            say(f"{score.node} is left out: {score.why}")
    return [argument]


def _choose(
    client: SlurmClient,
    spec: RunSpec,
    options: SbatchOptions,
    env: Mapping[str, str],
    users: frozenset[str],
    *,
    now_ns: int,
) -> tuple[tuple[str, ...], tuple[NodeScore, ...]]:
    settings = settings_of(spec)
    cluster = env.get("SLURM_CLUSTER_NAME") or client.config().cluster or ""
    scores = score_nodes(account_evidence(env, cluster=cluster), now_ns=now_ns, hours=settings.hours)
    if not any(score.is_bad for score in scores):
        return (), ()
    names = options.partition or env.get("SBATCH_PARTITION")
    eligible = [part for part in client.partitions(names) if names or part.default]
    exclusion = choose_excluded(
        scores,
        known=frozenset().union(*(part.names for part in eligible)),
        usable=frozenset().union(*(part.usable_names for part in eligible)) - users,
        need=nodes_needed(spec),
        required=expand(options.nodelist or ""),
        share=settings.share,
    )
    return exclusion.nodes, scores


def _goes_elsewhere(options: SbatchOptions, env: Mapping[str, str]) -> bool:
    """To another cluster, whose nodes are others."""
    elsewhere = any(argument.startswith(("-M", "--cluster")) for argument in options.extra)
    return elsewhere or bool(env.get("SBATCH_CLUSTERS") or env.get("SLURM_CLUSTERS"))


def _listed(options: SbatchOptions, env: Mapping[str, str]) -> str:
    """The user's own list."""
    given = [word.partition("=")[2] for word in options.extra if word.startswith("--exclude=")]
    return (given or [options.exclude or env.get("SBATCH_EXCLUDE") or ""])[-1]
