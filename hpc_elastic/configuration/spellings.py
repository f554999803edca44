"""What an unknown name was probably meant to be: what other launchers call it, or else what looks most alike. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_EACH = "on each node"
_RANGE = "a range, as in --nodes 2-4"
_ALL = "on each node, not on all of them"
_WHEN = "and --mail-type says when"

MEANT: Mapping[str, tuple[str, str]] = {
    # torchrun, python -m torch.distributed.launch, mpirun
    **dict.fromkeys(
        ("nproc", "nprocs", "np", "num-procs", "procs-per-node", "processes-per-node", "num-processes-per-node"),
        ("nproc-per-node", _EACH),
    ),
    **dict.fromkeys(("workers", "nworkers", "workers-per-node"), ("nproc-per-node", _EACH)),
    "world-size": ("nproc-per-node", _ALL),
    "rdzv-timeout": ("rdzv-conf", "timeout=SECONDS"),
    # accelerate
    "num-processes": ("nproc-per-node", _ALL),
    "num-machines": ("nodes", ""),
    "main-process-ip": ("master-addr", "only where the address that is found will not do"),
    "main-process-port": ("master-port", "only where it must be a certain one"),
    # DeepSpeed, Lightning
    **dict.fromkeys(("num-nodes", "nnode", "n-nodes", "machines", "num-hosts"), ("nodes", "")),
    **dict.fromkeys(("min-nodes", "max-nodes", "min-nnodes", "max-nnodes"), ("nodes", _RANGE)),
    **dict.fromkeys(
        ("num-gpus", "ngpus", "n-gpus", "gpu", "devices", "gpus-per-machine", "num-gpus-per-node"),
        ("gpus-per-node", _EACH),
    ),
    **dict.fromkeys(("include", "hosts", "hostfile", "nodes-list"), ("nodelist", "")),
    **dict.fromkeys(("exclude-nodes", "exclude-hosts"), ("exclude", "")),
    # sbatch, PBS, LSF, as one remembers them
    **dict.fromkeys(("time-limit", "timelimit", "walltime", "wall-time", "max-time", "timeout"), ("time", "")),
    **dict.fromkeys(("mail", "email", "mail-to", "notify"), ("mail-user", _WHEN)),
    **dict.fromkeys(("name", "job", "jobname"), ("job-name", "")),
    "queue": ("partition", ""),
    "project": ("account", ""),
    **dict.fromkeys(("cpus", "ncpus", "num-cpus", "cores", "cpus-per-node"), ("cpus-per-task", _EACH)),
    **dict.fromkeys(("memory", "mem-per-node"), ("mem", _EACH)),
    **dict.fromkeys(("workdir", "work-dir", "working-dir", "working-directory", "cwd"), ("chdir", "")),
    **dict.fromkeys(("env", "environment"), ("export", "")),
    # ours
    **dict.fromkeys(("logs", "logdir", "log-path", "output-dir", "run-dir"), ("runs-dir", "")),
    **dict.fromkeys(("restarts", "retries", "max-retries"), ("max-restarts", "")),
    "requeues": ("max-requeues", ""),
    **dict.fromkeys(("spare", "spare-nodes", "hot-spares"), ("spares", "")),
    **dict.fromkeys(("grace-period", "grace-time", "notice"), ("grace", "")),
}
"""Other programs' names → ours, and what differs. Without the dashes in front."""

SBATCHS_OWN = frozenset(
    (
        "bb", "bbf", "cluster-constraint", "clusters", "container", "contiguous", "core-spec", "cores-per-socket",
        "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "distribution", "export-file", "extra-node-info",
        "get-user-env", "gid", "gpu-bind", "gpu-freq", "gpus-per-socket", "gres-flags", "hint", "hold", "ignore-pbs",
        "input", "kill-on-invalid-dep", "licenses", "mcs-label", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus",
        "network", "nice", "no-kill", "nodefile", "ntasks-per-core", "ntasks-per-socket", "open-mode", "overcommit",
        "oversubscribe", "power", "prefer", "priority", "propagate", "reboot", "resv-ports", "sockets-per-node",
        "spread-job", "stepmgr", "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind",
        "tres-per-job", "tres-per-node", "tres-per-task", "uid", "use-min-nodes", "wait-all-nodes", "wckey",
    )
)  # fmt: skip
"""What sbatch alone knows (its manual, 20.11 to 26.05): no misspelling of ours, however alike."""

_ALIKE = 0.66


def nearest(name: str, known: Collection[str]) -> str | None:
    """Which of `known` was probably meant, None where none looks like it.

    Args:
        name: Without the dashes in front, with ``-`` or ``_``.
        known: The same, with ``-``.
    """
    plain = name.replace("_", "-").lower()
    meant = MEANT.get(plain, ("", ""))[0]
    if meant in known:
        return meant
    if plain in SBATCHS_OWN:
        return None
    from difflib import get_close_matches

    return next(iter(get_close_matches(plain, known, n=1, cutoff=_ALIKE)), None)


def remark_on(name: str) -> str:
    """What differs between another program's option and the one that is meant; empty for nothing."""
    return MEANT.get(name.replace("_", "-").lower(), ("", ""))[1]
