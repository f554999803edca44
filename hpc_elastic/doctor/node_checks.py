"""What the nodes' facts mean for a run: whether all came, their files, and what Slurm gave them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from hpc_elastic.base.text import first_of
from hpc_elastic.doctor.file_probe import LOOK_SECONDS, FileFacts
from hpc_elastic.doctor.findings import Finding, Level, ok, problem, warning
from hpc_elastic.doctor.host_checks import judge_folders, judge_quota, judge_room
from hpc_elastic.doctor.job_probe import JobFacts, NoticeFacts
from hpc_elastic.doctor.node_facts import NodeFacts
from hpc_elastic.slurm.notation import names_text

_SLOW_STORE = 2.0
_LATE = 1.0
_LEAST_FREE = 1 << 30


def judge_nodes(
    facts: Mapping[str, NodeFacts], nodes: Sequence[str], *, ended: str = "", kill_wait: float | None = None
) -> list[Finding]:
    """Judge what the frame itself has measured.

    Args:
        facts: By node.
        nodes: Of the job, in its order.
        ended: Why the job ended without all facts; empty: it did not.
        kill_wait: Slurm's, in seconds.
    """
    return [*_came(facts, nodes, ended), *_files(facts), *_slurm(facts, kill_wait)]


def fold(found: Sequence[tuple[str, Finding]]) -> list[Finding]:
    """The findings of nodes, those that say the same in one line that names the nodes.

    Args:
        found: Node and finding, in the order of the lines.
    """
    lines: dict[tuple[str, Level, str], list[tuple[str, Finding]]] = {}
    for node, finding in found:
        lines.setdefault((finding.check, finding.level, finding.means), []).append((node, finding))
    folded = []
    for same in lines.values():
        texts = list(dict.fromkeys(finding.found for _, finding in same))
        where = names_text([node for node, _ in same])
        first = same[0][1]
        folded.append(
            Finding(
                check=first.check, level=first.level, found=f"{where}: {first_of(texts, 2)}", means=first.means,
                way_out=first.way_out,
            )
        )  # fmt: skip
    return folded


def _came(facts: Mapping[str, NodeFacts], nodes: Sequence[str], ended: str) -> Iterator[Finding]:
    missing = [node for node in nodes if node not in facts]
    if missing or not nodes:
        yield problem(
            "nodes.job",
            f"nothing came from {names_text(missing) if missing else 'any node'}{f': {ended}' if ended else ''}",
            "a run would not have those nodes, or not begin at all",
            "see the job's log and report in its run directory; leave the nodes out with --exclude",
        )  # fmt: skip
    stopped = [
        (
            node,
            problem(
                "nodes.job", f"stopped while it probed {each.unfinished}{f': {ended}' if ended else ''}",
                "what it would check is not known there", "see the job's log and report in its run directory",
            ),
        )
        for node, each in facts.items()
        if each.unfinished
    ]  # fmt: skip
    yield from fold(stopped)
    if nodes and not missing and not stopped:
        yield ok("nodes.job", f"agents and workers ran on {names_text(nodes)}")
    failed = [
        (node, problem("nodes.probes", f"{part}: {why}", "what it checks is not known there", "try it on that node"))
        for node, each in facts.items()
        for part, why in each.failed.items()
    ]
    yield from fold(failed)


# -- files ---------------------------------------------------------------------------------------------------------


def _files(facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    files = {node: each.files for node, each in facts.items() if each.files is not None}
    if not files:
        return
    yield from fold([(node, finding) for node, each in files.items() for finding in _rooms(each)])
    if len(facts) > 1:
        yield from _exclusive(files)
        yield from fold([(node, finding) for node, each in files.items() for finding in _meeting(each)])
        yield from fold([(node, finding) for node, each in files.items() for finding in _caches(each)])


def _rooms(files: FileFacts) -> Iterator[Finding]:
    yield judge_room("nodes.runs", files.runs, _LEAST_FREE)
    yield from judge_folders("nodes", files.folders)
    yield judge_quota("nodes.quota", files.quotas)


def _exclusive(files: Mapping[str, FileFacts]) -> Iterator[Finding]:
    winners = [node for node, each in files.items() if each.created]
    if any(each.created is None for each in files.values()):
        return
    if len(winners) == 1:
        yield ok("nodes.create", f"of {len(files)} nodes that created one name at once, one did")
    else:
        yield problem(
            "nodes.create", f"{len(winners)} of {len(files)} nodes could create the same name",
            "the nodes could not agree on anything: rounds would have several coordinators",
            "another filesystem with --runs-dir, or caches of names off on this one",
        )  # fmt: skip


def _meeting(files: FileFacts) -> Iterator[Finding]:
    seconds = files.store_seconds
    kind = f" ({files.filesystem})" if files.filesystem else ""
    if seconds is None:
        yield problem(
            "nodes.store", f"what other nodes wrote to the runs directory{kind} was not seen within a minute",
            "the nodes can't meet there", "another filesystem with --runs-dir; is it the same one on all nodes?",
        )  # fmt: skip
    elif seconds > _SLOW_STORE:
        yield warning(
            "nodes.store", f"{seconds:.1f} s until all nodes have read what each wrote{kind}",
            "starts and restarts take that much longer, and a slow node may count as lost",
            f"--rdzv-conf heartbeat_ttl={max(20, round(10 * seconds))}, or another filesystem with --runs-dir",
        )  # fmt: skip
    else:
        yield ok("nodes.store", f"within {max(seconds, 0.1):.1f} s all nodes have read what each wrote{kind}")


_WHAT = {
    "new": "a new file", "renamed": "a renamed file", "listed": "a file in a listing", "rewritten": "a file's new text"
}  # fmt: skip


def _caches(files: FileFacts) -> Iterator[Finding]:
    for name, what in _WHAT.items():
        if name not in files.late:
            continue
        seconds = files.late[name]
        if seconds is not None and seconds <= _LATE:
            yield ok(f"nodes.{name}", f"{what} of another node is seen at once")
            continue
        late = f"up to {seconds:.0f} s late" if seconds is not None else f"not within {LOOK_SECONDS:.0f} s"
        yield warning(
            f"nodes.{name}", f"{what} of another node is seen {late} (cached)",
            "agents ask the server, and are not held up; a script that waits for another rank's file is",
            "in the script, wait by a collective (barrier), or list the folder anew before each look",
        )  # fmt: skip


# -- what Slurm gave -----------------------------------------------------------------------------------------------


def _slurm(facts: Mapping[str, NodeFacts], kill_wait: float | None) -> Iterator[Finding]:
    jobs = [(node, finding) for node, each in facts.items() if each.slurm is not None for finding in _job(each.slurm)]
    yield from fold(jobs)
    notices = [(node, each.notice) for node, each in facts.items() if each.notice is not None]
    yield from fold([(node, _notice(each, kill_wait)) for node, each in notices])


def _job(job: JobFacts) -> Iterator[Finding]:
    given = job.job_cpus or job.cpus
    if job.cpus < given:
        yield problem(
            "nodes.cpus", f"workers may use {job.cpus} of the job's {given} CPUs",
            "data loaders and compilers share them: training is slow",
            "--cpus-per-task with the number for the node; ask the site about TaskPlugin",
        )  # fmt: skip
    elif job.cpus == 1 and job.host_cpus > 1:
        yield warning(
            "nodes.cpus", f"1 of the node's {job.host_cpus} CPUs", "all workers of a node share it",
            "--cpus-per-task N, or --exclusive",
        )  # fmt: skip
    else:
        yield ok("nodes.cpus", f"workers may use {job.cpus} of the node's {job.host_cpus} CPUs")
    if job.oom_kill_seen is False:
        yield warning(
            "nodes.memory", f"a process that took more than {job.limit} was not killed, or that was not counted",
            "a worker out of memory may slow the node down, or look as if a person had killed it",
            "--health-checks memory=SIZE; ask the site about ConstrainRAMSpace and ConstrainSwapSpace",
        )  # fmt: skip
    elif not job.limit or not job.counts_oom_kills:
        yield warning(
            "nodes.memory", "no limit of the job's memory" if not job.limit else "OOM kills are not counted",
            "a worker out of memory takes others of the node with it, or its end is not explained",
            "--mem with what the workers need; ask the site about cgroups (ConstrainRAMSpace)",
        )  # fmt: skip
    else:
        tried = "; a process beyond it was killed, and counted" if job.oom_kill_seen else ""
        yield ok("nodes.memory", f"{job.limit}{tried}")


def _notice(notice: NoticeFacts, kill_wait: float | None) -> Finding:
    if notice.seconds is not None:
        return ok("nodes.signals", f"a signal to the batch script reached the workers within {ceil(notice.seconds)} s")
    left = f" but the {kill_wait:g} s of KillWait" if kill_wait is not None else ""
    return problem(
        "nodes.signals", notice.error or "a signal to the batch script did not reach the workers",
        f"before a time limit or a preemption there is no time for a last checkpoint{left}",
        "save often; ask the site whether scancel --signal --batch works on nodes",
    )  # fmt: skip
