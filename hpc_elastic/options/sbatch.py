"""sbatch's options → its arguments and ``#SBATCH`` lines, checked; and its numbers of nodes, times and arrays. Pure.

No shell expands ``#SBATCH`` lines; quotes and backslashes quote as in C (read in sbatch's parser, and tried:
tests/integration hands nasty values to the real one). A line break can't be written there at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from hpc_elastic.errors import UsageError

MAX_NODES = 1 << 17
_RANGE = re.compile(r"(\d{1,9})(?:[-:](\d{1,9}))?\Z", re.ASCII)


def parse_nodes(text: str, option: str = "--nodes") -> tuple[int, int]:
    match = _RANGE.match(text)
    if match is None:
        raise UsageError(f"{option} {text}: not a number of nodes; give one as in 4, or a range as in 2-4 or 2:4")
    least = int(match.group(1))
    most = int(match.group(2) or least)
    if least < 1 or most < 1:
        raise UsageError(f"{option} {text}: a run needs at least 1 node")
    if most < least:
        raise UsageError(f"{option} {text}: the minimum is above the maximum; write {option} {most}-{least}")
    if most > MAX_NODES:
        raise UsageError(f"{option} {text}: at most {MAX_NODES} nodes")
    return least, most


_CLOCK = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?\Z", re.ASCII)
_UNLIMITED = ("unlimited", "infinite", "-1", "partition_limit")
# torchrun's --tee and --redirects: LOCAL_RANK:{0,1,2,3}, comma-separated.
_TEE = re.compile(r"\d+:[0-3](?:,\d+:[0-3])*\Z|\d+:\d+,.*\Z", re.ASCII)


def parse_time_limit(text: str) -> int | None:
    """Seconds; None where there is no limit. Raises ValueError for what is none of Slurm's forms."""
    if text.lower() in _UNLIMITED:
        return None
    match = _CLOCK.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a time")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    assert first is not None
    if days is not None:  # D-H, D-H:M, D-H:M:S
        return ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:  # H:M:S
        return (first * 60 + (second or 0)) * 60 + third
    return first * 60 + (second or 0)  # M, M:S


def check_time_option(text: str, option: str = "-t") -> int | None:
    """`parse_time_limit` of a user's ``-t``/``--time``: not zero, nor torchrun's ``-t`` (tee)."""
    if _TEE.match(text):
        raise UsageError(
            f"{option} {text}: here {option} is the time limit, as in sbatch; torchrun's -t is --tee {text} "
            "(for a time write the seconds with two digits, as in 10:00)"
        )
    try:
        seconds = parse_time_limit(text)
    except ValueError:
        raise UsageError(
            f"{option} {text}: not a time; give minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            "days-hours:minutes, days-hours:minutes:seconds or UNLIMITED"
        ) from None
    if seconds == 0:
        why = f"a time limit of zero; leave {option} out for the partition's own, or UNLIMITED"
        raise UsageError(f"{option} {text}: {why}")
    return seconds


MAX_TASKS = 1 << 17
_LIMIT = re.compile(r"%\d{1,9}\Z", re.ASCII)
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?\Z", re.ASCII)


def parse_array(text: str, *, option: str = "--array") -> tuple[int, ...]:
    """``0-7%2``, ``1,3,5``, ``0-15:4`` → the tasks' numbers, ascending."""
    tasks: set[int] = set()
    for part in _LIMIT.sub("", text).split(","):
        match = _PART.match(part)
        if match is None:
            raise UsageError(f"{option} {text}: not a list of tasks; give one as in 0-7, 1,3,5 or 0-15:4%2")
        first = int(match.group(1))
        last = int(match.group(2) or first)
        step = int(match.group(3) or 1)
        if last < first or step < 1:
            raise UsageError(f"{option} {text}: {part} has no task; the lower number comes first")
        if len(tasks) + (last - first) // step >= MAX_TASKS:
            raise UsageError(f"{option} {text}: more than {MAX_TASKS} tasks")
        tasks.update(range(first, last + 1, step))
    return tuple(sorted(tasks))


_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]*-]+\Z")
_MAX_VALUE = 4000  # bytes; sbatch copies an argument into a buffer of 8192
COMMENT_MARK = "hpc-elastic "
"""Begins the comment of a job that this program submitted; the run directory follows."""

# Tasks belong to srun: with them, 20.11 and 22.05 give `-N3-4` 3 nodes with 4 idle, and after a requeue for ever what
# was left. The others make sbatch do something else than submit this script.
IMPOSSIBLE = {
    name: why
    for names, why in (
        ("--ntasks -n --ntasks-per-node --ntasks-per-gpu --tasks-per-node",
         "tasks are started by srun, one agent per node; use --nproc-per-node for workers"),
        ("--gpus-per-task", "one agent per node has all its GPUs; use --gpus-per-node"),
        ("--gpus -G", "use hpc-elastic submit --gpus, or --gpus-per-node"),
        ("--array -a", "use hpc-elastic submit --array, which gives each task a run directory of its own"),
        ("--wrap", "the batch script is generated"),
        ("--wait -W", "use hpc-elastic submit --wait, which follows requeues"),
        ("--test-only", "use --dry-run"),
        ("--help --usage", "see sbatch --help"),
        ("--version -V", "see sbatch --version"),
    )
    for name in names.split()
}  # fmt: skip
RELIED_ON = {
    "--signal": "the run's notice before the time limit comes by it; give --grace SECONDS, or --signal itself",
    "--open-mode": "every attempt appends to the job log",
    **dict.fromkeys(("--no-kill", "-k"), "--no-kill is always given, so that a run survives the loss of nodes"),
    **dict.fromkeys(("--chdir", "-D"), "give --chdir itself: workers begin there too"),
}
"""sbatch's options by which a run lives: they would silently take the place of its own."""
_OF_THE_STEP = {
    **dict.fromkeys(("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--nodelist", "-w"), "one agent is started"
                    " on each node of the run; give --nodes or --nodelist to hpc-elastic"),
    **dict.fromkeys(("--kill-on-bad-exit", "-K", "--wait", "-W"), "an agent that ends must not end the others"),
    **dict.fromkeys(("--output", "-o", "--error", "-e"), "the job log is made of the agents' output; give --output to "
                    "hpc-elastic"),
    **dict.fromkeys(("--pty", "--multi-prog", "--test-only", "--help", "--version", "-V"), "no agent would be started"),
}  # fmt: skip
"""srun's options under which no run can work, with the reason and the way out."""


NO_HET_JOBS = "heterogeneous jobs are not supported; give one job of one component, with nodes of one kind"


def refuse_het_job(env: Mapping[str, str]) -> None:
    for name in ("SLURM_HET_SIZE", "SLURM_PACK_SIZE"):
        if env.get(name):
            raise UsageError(f"{name}={env[name]}: {NO_HET_JOBS}")


def has_components(words: Sequence[str]) -> bool:
    """Tell the words of an ``#SBATCH`` line that begin another component."""
    return ":" in words or (bool(words) and words[0] in ("hetjob", "packjob"))


AS_IT_IS = """
    --acctg-freq= --batch= --bb= --bbf= -b/--begin= --cluster-constraint= -M/--clusters= --consolidate-segments
    -C/--constraint= --container= --container-id= --contiguous -S/--core-spec= --cores-per-socket= --cpu-freq=
    --cpus-per-gpu= --deadline= --delay-boot= -d/--dependency= --distribution= --export-file= --extra=
    -B/--extra-node-info= --get-user-env=? --gid= --gpu-bind= --gpu-freq= --gpus-per-socket= --gres= --gres-flags=
    --hint= -H/--hold --ignore-pbs -i/--input= --kill-on-invalid-dep= -L/--licenses= --mail-type= --mail-user=
    --mcs-label= --mem-bind= --mem-per-cpu= --mem-per-gpu= --mincpus= --network= --nice=? -F/--nodefile=
    --ntasks-per-core= --ntasks-per-socket= --oom-kill-step=? -O/--overcommit -s/--oversubscribe --power= --prefer=
    --priority= --propagate=? -Q/--quiet --reboot --reservation= --resv-ports=? --sockets-per-node= --spread-job
    --spread-segments --stepmgr --switches= --thread-spec= --threads-per-core= --time-min= --tmp= --tres-bind=
    --tres-per-job= --tres-per-node= --tres-per-task= --uid= --use-min-nodes --wait-all-nodes= --wckey=
"""
"""Options that sbatch gets as they are, and no code of ours reads (its manual, 20.11 to 26.05): ``=`` takes a
value, ``=?`` may take one. ``--profile``, ``--segment`` and ``-m`` are names of ours: sbatch's take `--sbatch-arg`."""


class SbatchOptions(Struct, frozen=True, kw_only=True):
    """The options of sbatch that our code reads, by sbatch's names; None or empty: not given."""

    nodes: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    job_name: str | None = None
    exclude: str | None = None
    array: str | None = None
    output: str | None = None
    """A path with sbatch's %-patterns; `literal_path` for one without."""
    error: str | None = None
    gpus_per_node: str | None = None
    signal: str | None = None
    """The user's own, instead of `grace`'s."""
    comment: str | None = None
    chdir: str | None = None
    requeue: bool = True
    grace: int = 120
    """Seconds before the time limit at which USR2 is asked for. (Slurm may be up to 60 s early.)"""
    extra: tuple[str, ...] = ()
    """All others, one each: ``--licenses=matlab:2``; of ``--sbatch-arg`` also ``-Lmatlab:2``."""

    def overruled_variables(self) -> tuple[str, ...]:
        """The SBATCH_* variables that must not reach sbatch: they would win over our lines."""
        names = ["SBATCH_OPEN_MODE", "SBATCH_NO_KILL", "SBATCH_REQUEUE", "SBATCH_NO_REQUEUE"]
        names += ["SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_SIGNAL", "SBATCH_WAIT"]
        names.append("SBATCH_ARRAY_INX")  # an array that the run directory is not made for would have no tasks there
        for name in (*_given(self), *(option_name(one)[2:].replace("-", "_") for one in self.extra)):
            names += sbatch_variables(name)
        return tuple(dict.fromkeys(names))


class ScriptLines(Struct, frozen=True, kw_only=True):
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.setup or self.teardown)


_OTHER_VARIABLES = {
    "time": ("SBATCH_TIMELIMIT",),
    "array": ("SBATCH_ARRAY_INX",),
    "mem": ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"),
    "gpus_per_node": ("SBATCH_GPUS",),
    "cpu_freq": ("SBATCH_CPU_FREQ_REQ",),
    "requeue": ("SBATCH_NO_REQUEUE",),
}


def sbatch_variables(name: str) -> tuple[str, ...]:
    return (f"SBATCH_{name.upper()}", *_OTHER_VARIABLES.get(name, ()))


_MAIL = "none|begin|end|fail|requeue|all|invalid_depend|stage_out|time_limit(?:_[589]0)?|array_tasks"
_GRES = r"[^\s:,=]+(?:[:=][^\s,:=]+)*"
_SIGNALS = "HUP|INT|QUIT|ABRT|KILL|ALRM|TERM|USR1|USR2|URG|CONT|STOP|TSTP|TTIN|TTOU"
FORMS = {
    "mem": (r"\d+[kmgtp]?b?", "64G"),
    "cpus_per_task": (r"\d+", "8"),
    "gpus_per_node": (r"(?:[^\s:,]+:)?\d+(?:,[^\s:,]+:\d+)*", "8 or a100:8"),
    "gres": (rf"{_GRES}(?:,{_GRES})*", "gpu:8 or gpu:a100:8"),
    "mail_type": (rf"(?:{_MAIL})(?:,(?:{_MAIL}))*", "END,FAIL"),
    "begin": (r"(?:\d|now|midnight|noon|elevenses|fika|teatime|today|tomorrow).*", "now+1hour or 2026-01-31T08:00"),
    "exclusive": (r"user|mcs|topo", "user, or plain --exclusive"),
    "signal": (rf"(?:[RB]{{1,2}}:)?(?:\d+|(?:SIG)?(?:{_SIGNALS}))(?:@[0-5]?\d{{1,4}})?", "USR1@120 or B:USR1@120"),
    "dependency": (r"(?:after[a-z]*|expand|singleton|\d)[\w:+*,?()%-]*", "afterok:1234 or singleton"),
}
"""sbatch's plain values: what each may look like, and an example."""
_OURS = frozenset(("requeue", "grace", "extra", "signal"))  # not simply --name=value


def sbatch_arguments(options: SbatchOptions) -> list[str]:
    arguments: list[str] = []
    for name, value in _given(options).items():
        if name == "nodes":
            least, most = parse_nodes(value)
            value = str(least) if least == most else f"{least}-{most}"
        elif name == "time":
            check_time_option(value)
        arguments.append(f"--{name.replace('_', '-')}={value}")
    arguments.append("--requeue" if options.requeue else "--no-requeue")
    arguments += ["--no-kill", "--open-mode=append"]
    arguments.append(f"--signal={options.signal or f'B:USR2@{notice_grace(options)}'}")
    for argument in options.extra:
        if not argument.startswith("-") or argument in ("-", "--"):
            raise UsageError(f"--sbatch-arg {argument}: not an option; write it as --sbatch-arg=--name=value")
        check_possible(argument, option="--sbatch-arg")
        if (name := option_name(argument)) in RELIED_ON:
            raise UsageError(f"--sbatch-arg {argument}: {RELIED_ON[name]}")
    return [*arguments, *options.extra]


def check_srun_argument(text: str, option: str = "--srun-arg") -> None:
    if not text.startswith("-") or text in ("-", "--"):
        raise UsageError(f"{option} {text}: not an option; write it as {option}=--name=value")
    if (name := option_name(text)) in _OF_THE_STEP:
        raise UsageError(f"{option} {text}: not possible here: {_OF_THE_STEP[name]}")


def split_option(word: str) -> tuple[str, str, str]:
    """``--time=10`` and ``-t10`` as name, ``=`` and value; the last two are empty for a name alone."""
    if word.startswith("--") or len(word) <= 2:
        return word.partition("=")
    return word[:2], "=", word[2:].removeprefix("=")


def option_name(argument: str) -> str:
    name = argument.partition("=")[0].partition(" ")[0]
    return name if name.startswith("--") else name[:2]


def check_possible(argument: str, *, option: str) -> None:
    if (name := option_name(argument)) in IMPOSSIBLE:
        raise UsageError(f"{option} {argument}: not possible here: {IMPOSSIBLE[name]}")


def notice_grace(options: SbatchOptions) -> int:
    """`grace`, but at most a quarter of a short job, which would otherwise get its notice as it begins."""
    limit = check_time_option(options.time) if options.time else None
    return options.grace if limit is None else max(1, min(options.grace, limit // 4))


def sbatch_line(argument: str) -> str:
    """One ``#SBATCH`` line that gives sbatch exactly `argument`."""
    name, equals, value = argument.partition("=")
    if any(char < " " or char == "\x7f" for char in argument):
        raise UsageError(f"{name} {value!r}: a line break or control character can't be given to sbatch")
    if len(argument.encode("utf-8", "surrogateescape")) > _MAX_VALUE:
        raise UsageError(f"{name} {value[:40]}...: longer than the {_MAX_VALUE} bytes that sbatch can take")
    if _PLAIN.match(argument):
        return f"#SBATCH {argument}"
    if equals and _PLAIN.match(name):
        return f"#SBATCH {name}={_quoted(value)}"
    return f"#SBATCH {_quoted(argument)}"


def _given(options: SbatchOptions) -> dict[str, str]:
    found = ((name, getattr(options, name)) for name in options.__struct_fields__ if name not in _OURS)
    return {name: value for name, value in found if value}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
