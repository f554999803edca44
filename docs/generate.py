"""Writes the pages of docs/reference that follow from the code: cli, configuration, states, signals, python …

::

    python docs/generate.py

A test fails where a page and the code differ. What the other pages show of a program's output is written by
``pytest tests/docs/test_docs_output.py --update-docs``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import itertools
import os
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, whatever else is installed

from docs.python_page import python_page  # noqa: E402
from hpc_elastic.agent import fork_server_states, supervision  # noqa: E402
from hpc_elastic.agent.fork_server_states import ServerState  # noqa: E402
from hpc_elastic.agent.supervision import Phase  # noqa: E402
from hpc_elastic.cli import main as cli  # noqa: E402
from hpc_elastic.failures import patterns  # noqa: E402
from hpc_elastic.launch import signals  # noqa: E402
from hpc_elastic.options.run_request import ALL_OPTIONS, default_of  # noqa: E402
from hpc_elastic.options.table import Keys, key_of, variable_of  # noqa: E402
from hpc_elastic.rendezvous import state as rendezvous_state  # noqa: E402
from hpc_elastic.rendezvous.state import Status  # noqa: E402
from hpc_elastic.run import agent_events, coordinator_events, supervisor_events  # noqa: E402
from hpc_elastic.run.event_types import RunEvent, name_of  # noqa: E402


def _life() -> ModuleType:
    """The in-process restart group's table, without its package: that imports torch."""
    spec = importlib.util.spec_from_file_location("life", ROOT / "hpc_elastic" / "inprocess" / "life.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


life = _life()

CLI_INTRODUCTION = """\
# Command line

<!-- Written by docs/generate.py; do not edit. -->

Long options are taken with `-` and with `_`. The script, or `--`, ends our options: what follows is the script's own,
untouched. A variable in brackets, as in `[PET_NNODES]`, gives the value where the option is not there. Wrong usage is
one line on stderr and exit code 2; the other codes are [here](exit-codes.md).
"""

CONFIGURATION_INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate.py from the tables of options in hpc_elastic/options/; do not edit. -->

Every option of `submit` and `run` can be given outside the command line, too. A later layer wins:

1. defaults, as below
2. the site's file: the first `hpc_elastic/config.toml` in `$XDG_CONFIG_DIRS` (default `/etc/xdg`);
   `$HPC_ELASTIC_SITE_CONFIG` names another
3. the user's: `$XDG_CONFIG_HOME/hpc_elastic/config.toml` (default `~/.config`); `$HPC_ELASTIC_USER_CONFIG` names
   another
4. the project's: `hpc_elastic.toml`, or `[tool.hpc-elastic]` in `pyproject.toml`, the first from the working directory
   upwards, as far as the folder with `.git` or your home; `$HPC_ELASTIC_PROJECT_CONFIG` names another
5. a profile: the tables `[profile.NAME]` of these files, in their order, where `--profile NAME`, `$HPC_ELASTIC_PROFILE`
   or a file's `default-profile = "NAME"` asks for it
6. the environment: `HPC_ELASTIC_...` as below; where that is unset, torchrun's `PET_...`, and for the job sbatch's own
   `SBATCH_...`
7. the [command line](cli.md), or in Python the arguments

A variable that names a file and is empty means: no such file. A value replaces those of lower layers whole, lists too;
an empty string, an empty list and `exclusive = false` mean that the option is not given at all. sbatch's other options
are keys and variables as well, by their long names: `licenses = "matlab:2"`, `contiguous = true`.

`hpc-elastic config` shows every value with the file and line, variable or option that it comes from. With `--json` it
is one object: `profile`, `files` (`layer`, `path`, `state`), and in `settings` by key the `value`, its `layer`, `where`
and `profile`. What is wrong is one line on stderr, and exit code 2: an unknown key, with the nearest name; a value of
the wrong type; a value that the option refuses.

In files, keys are written with `-` or `_`, and values are TOML's: strings in quotes, numbers plain, `true` or `false`
for switches, an array of strings for what may be repeated. In `runs-dir`, `chdir`, `python` and `template`, `~` and
`$NAME` are expanded; in the project's file they are relative to that file, in the others to the working directory.

What files say is executed in your name. So a file, and each link that leads to it, must belong to you or to root, and
not everybody may be allowed to write to it; another one is refused with one line, and not skipped in silence. A
variable that names a file (`HPC_ELASTIC_PROJECT_CONFIG=/home/colleague/project/hpc_elastic.toml`) says that you trust
it. Root reads root's files only. A stranger's `pyproject.toml` without a table of ours is left alone. A file
has at most 256 KiB, and a key at most 16 parts. Where a file decides what is executed (`python`, `template`,
`health-check`, `chdir`, `module`, `no-python`, `sbatch-arg`, `srun-arg`), `submit` and `run` show on stderr its name,
the line and the value.

Agents and workers read none of this: what holds for a run is in its run.json, on every node and in every attempt.

"""

STATES_INTRODUCTION = """\
# States

<!-- Written by docs/generate.py from the tables in hpc_elastic/rendezvous/state.py,
hpc_elastic/agent/supervision.py and hpc_elastic/inprocess/life.py; do not edit. -->
"""

SIGNALS_INTRODUCTION = """\
# What a signal means

<!-- Written by docs/generate.py from the table in hpc_elastic/launch/signals.py; do not edit. -->

A signal by itself says little: Slurm sends SIGTERM when a preemption's grace time begins, when it is over, at the
time limit, at a cancel and at a requeue. So whoever hears one tells all, the supervisor asks Slurm about the job (for
2 s at most), and this table decides. Where workers may save first, the [notice](../how-to/save-before-the-end.md) is
given to them with the time that is left, and what is heard later informs, unless it ends everything now
or leaves less time. An agent that hears nothing from the supervisor for 4 s (or half of KillWait) goes by the
signal alone: SIGUSR2 is a notice of `--grace` seconds, SIGTERM ends the run.

| heard | by | Slurm: the job … | it is a | workers | until | who requeues |
| --- | --- | --- | --- | --- | --- | --- |
"""

SIGNALS_END = """
The supervisor looks at the job by itself as well: when it starts, since a notice that came during the batch script's
set-up is lost; and `--grace` seconds before the limit (at most a quarter of it), since nobody gives notice in an
allocation that was made without `--signal`.

What is requeued counts for `--max-requeues`, and only a job that [may be](../how-to/resume-after-requeue.md) is. A
job that is cancelled while an attempt ends does not come back. While Slurm ends a job its record says COMPLETING,
whatever comes after it: the limit is told by its reason, a preemption by its PreemptTime, a requeue by its Restarts.
"""

KNOWN_INTRODUCTION = """\
# Failures that are known by their words

<!-- Written by docs/generate.py from the tables in hpc_elastic/failures/patterns.py; do not edit. -->

What is looked for in an exception's text and in what it was raised from, else in the last lines of stderr; upper and
lower case are alike, `*` stands for at most 200 characters of a line, and the first row that fits holds. A *symptom* is
what a healthy rank says when another one is gone; *root* is a candidate for the cause; *infrastructure* is not the
script's. The node is suspect where the words tell of a part of it that is likely broken. A failure that is worth
another try still ends the run where it comes again with no progress between.

Where an exception was raised decides before its text does. A symptom needs a type, an innermost frame or a text of
torch's process group, gloo or NCCL: the broken pipe to a subprocess, a reset connection to a data server and a message
that the script put together are no symptoms. A text of the system's error numbers ("no space left on device") in a
message that the script raised counts only with its number. Of exceptions that were raised from each other, or while
another one was handled, the first one decides.

Real excerpts, with their sources, are in tests/data/failures.
"""


def help_text(*arguments: str, option: str = "--help") -> str:
    """What ``--help`` or ``--help-all`` prints, at a fixed width."""
    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main([*arguments, option])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return printed.getvalue().rstrip("\n")


def cli_page() -> str:
    parts = [CLI_INTRODUCTION, f"```text\n{help_text()}\n```\n"]
    for name, (_, text) in cli._SUBCOMMANDS.items():
        if text.startswith("the same as "):
            other = text.rpartition(" ")[2]
            parts.append(f"## {name}\n\nThe same as [{other}](#{other}).\n")
            continue
        shown = help_text(name, option="--help-all" if name in ("submit", "run", "agent") else "--help")
        parts.append(f"## {name}\n\n```text\n{shown}\n```\n")
    return "\n".join(parts)


def configuration_page() -> str:
    """Every key, as a table."""
    lines = ["| key | variable | value | default | |", "| --- | --- | --- | --- | --- |"]
    for option in Keys(ALL_OPTIONS).options():
        if not option.in_files or not option.help:
            continue
        variables = [f"`{name}`" for name in (variable_of(option), option.env) if name]
        value = "true or false" if option.metavar is None else f"`{option.metavar}`".replace("|", "\\|")
        value += ", or several" if option.repeatable else ", or true" if option.optional_value else ""
        default = default_of(option)
        shown = "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        text = option.help.replace("|", "\\|")
        lines.append(f"| `{key_of(option)}` | {', '.join(variables)} | {value} | {shown} | {text} |")
    return "\n".join([CONFIGURATION_INTRODUCTION + "## Keys\n", *lines, ""])


def diagram(table: Mapping[Enum, Mapping[Enum, Enum]], first: Enum) -> str:
    """A table of transitions as a Mermaid state diagram. Events between the same two states share an arrow."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.value}"]
    for state, row in table.items():
        arrows: dict[Enum, list[str]] = {}
        for event, target in row.items():
            arrows.setdefault(target, []).append(str(event.value))
        lines += [f"    {state.value} --> {target.value}: {', '.join(events)}" for target, events in arrows.items()]
        if not row:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join([*lines, "```", ""])


def rows(table: Mapping[Enum, Mapping[Enum, Enum]]) -> str:
    """The same as a Markdown table: one row per state and event. What has no row is refused."""
    lines = ["| state | event | next state |", "| --- | --- | --- |"]
    lines += [
        f"| {state.value} | {event.value} | {target.value} |"
        for state, row in table.items()
        for event, target in row.items()
    ]
    return "\n".join([*lines, ""])


def words_of_members(path: Path, name: str) -> dict[str, str]:
    """What an enumeration's source says about its members, by member."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {}
    for statement, after in itertools.pairwise(body):
        if isinstance(statement, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[ast.unparse(statement.targets[0])] = " ".join(str(after.value.value).split())
    return found


def sequence() -> str:
    """A wrapped call with one fault, as a Mermaid sequence diagram: the table walked along `life.RESTART`."""
    words = words_of_members(ROOT / "hpc_elastic" / "inprocess" / "life.py", "CallPhase")
    lines = [
        "```mermaid",
        "sequenceDiagram",
        "    participant F as the rank that fails",
        "    participant S as the group's store",
        "    participant O as every other rank",
    ]
    phase = life.CallPhase.JOINING
    for event in life.RESTART:
        said = words[phase.name].replace("`", "").replace(";", ",").replace(":", ",").rstrip(".")
        lines.append(f"    Note over F,O: {phase.value} - {said}")
        if phase in life.BARRIERS:
            name = life.BARRIERS[phase].replace("_", " ")
            lines += [
                f"    F->>S: {name}",
                f"    O->>S: {name}",
                f"    S-->>F: {event.value}",
                f"    S-->>O: {event.value}",
            ]
        elif event is life.CallEvent.INTERRUPTED:
            lines += [
                "    F->>S: record_interrupted",
                "    S-->>O: interrupted",
                "    O->>S: answer",
                "    F->>S: answer",
            ]
        phase = life.next_phase(phase, event)
    lines.append(f"    Note over F,O: {phase.value}")
    return "\n".join([*lines, "```", ""])


def states_page() -> str:
    return "\n".join(
        [
            STATES_INTRODUCTION,
            "## A rendezvous\n\nWhat the log of a run's rounds says; the coordinator alone writes it.\n",
            diagram(rendezvous_state.TRANSITIONS, Status.JOINABLE),
            rows(rendezvous_state.TRANSITIONS),
            "## An agent\n\nWhat the agent of one node is doing.\n",
            diagram(supervision.TRANSITIONS, Phase.JOINING),
            rows(supervision.TRANSITIONS),
            "## A fork server\n\n"
            "What a node's agent knows of the process that its workers are [forks of](../how-to/warm-start.md).\n",
            diagram(fork_server_states.TRANSITIONS, ServerState.OFF),
            rows(fork_server_states.TRANSITIONS),
            "## A rank of a wrapped call\n\n"
            "What a rank does that [restarts in its process](../how-to/restart-in-process.md).\n",
            diagram(life.TRANSITIONS, life.CallPhase.JOINING),
            rows(life.TRANSITIONS),
            "A call with one fault, on the ranks that stay:\n",
            sequence(),
        ]
    )


def signals_page() -> str:
    """The table, with what is the same for several words of Slurm's, or for both hearers, in one row."""
    said: dict[tuple[str, tuple[str, ...], signals.Reaction], list[str]] = {}
    for call, halves in signals.TABLE.items():
        for condition in signals.JobCondition:
            found: dict[signals.Reaction, list[str]] = {}
            for heard_by, rows in halves.items():
                if condition in rows:
                    found.setdefault(rows[condition], []).append(heard_by.value)
            for row, hearers in found.items():
                said.setdefault((call.value, tuple(hearers), row), []).append(condition.value)
    lines = []
    for (call_text, by, row), words in said.items():
        who = "supervisor or agents" if len(by) == len(signals.HeardBy) else by[0]
        saves = "may save first" if row.saves else "are ended"
        asked = "whatever it says" if len(words) == len(signals.JobCondition) else "; ".join(words)
        by_whom = _who_requeues(row, words)
        lines.append(
            f"| {call_text} | {who} | {asked} | {row.meaning.value} | {saves} | {row.deadline.value} | {by_whom} |"
        )
    return SIGNALS_INTRODUCTION + "\n".join(lines) + "\n" + SIGNALS_END


def _who_requeues(row: signals.Reaction, words: list[str]) -> str:
    if row.meaning is signals.Meaning.CANCEL:
        return "nobody"
    return "Slurm has" if words == [signals.JobCondition.REQUEUED.value] else "we do"


def known_failures_page() -> str:
    """The words that are known, as tables."""
    lines = ["| what happened | class | another try | node suspect | words |", "| --- | --- | --- | --- | --- |"]
    for row in patterns.PATTERNS:
        texts = ", ".join(f"`{text}`" for text in row.any_of)
        kind = row.failure_class.value + (f", {row.category.value}" if row.category is not None else "")
        tried = "yes" if row.retryable else "no"
        lines.append(f"| {row.says} | {kind} | {tried} | {'yes' if row.node_suspect else ''} | {texts} |")
    for name, says in patterns.SYMPTOM_TYPES.items():
        lines.append(f"| {says} | symptom | yes | | an exception of type `{name}` that torch's process group raised |")
    xids = ["| Xid | what happened | class | node suspect |", "| --- | --- | --- | --- |"]
    for number, (failure_class, suspect, says) in patterns.XIDS.items():
        xids.append(f"| {number} | {says} | {failure_class.value} | {'yes' if suspect else ''} |")
    heading = "## The GPU driver's Xid\n\nThe most telling one counts; others than these are infrastructure.\n"
    return "\n".join([KNOWN_INTRODUCTION, *lines, "", heading, *xids, "", VERDICTS_INTRODUCTION, verdicts_table(), ""])


def verdicts_table() -> str:
    """What the page has between the marks: the result of running the calibration catalogue, which takes minutes."""
    page = ROOT / "docs" / "reference" / "known-failures.md"
    begin, end = VERDICTS_MARKS
    kept = page.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0] or "\n\n"
    return begin + kept + end


VERDICTS_MARKS = (
    "<!-- verdicts: begin, written by python -m tests.verdicts.run --update-docs -->",
    "<!-- verdicts: end -->",
)
VERDICTS_INTRODUCTION = """\
## How often the report is right

The calibration catalogue (tests/verdicts) has failures that really happen, each on 2 nodes with 2 workers and without a
restart; what is right to report of each was written before it was run. *Right* is a report that names the rank or the
node and states what happened there; *honest* is one that states that the cause is not known and sends nobody to a wrong
rank; all others are *wrong*. `python -m tests.check --tier verdicts` runs the catalogue before a release.
"""


def words_of_fields(path: Path) -> dict[str, dict[str, str]]:
    """Of each record in a module: its fields, and the texts that stand below them."""
    found: dict[str, dict[str, str]] = {}
    for record in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(record, ast.ClassDef):
            words = found[record.name] = {}
            for statement, after in itertools.zip_longest(record.body, record.body[1:]):
                if isinstance(statement, ast.AnnAssign):
                    has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    words[ast.unparse(statement.target)] = " ".join(str(after.value.value).split()) if has_text else ""
    return found


def events_table(module: ModuleType) -> str:
    """A module's events: what each says, and its fields."""
    words = words_of_fields(Path(str(module.__file__)))
    lines = ["| event | says | fields |", "| --- | --- | --- |"]
    for kind in vars(module).values():
        if not (isinstance(kind, type) and issubclass(kind, RunEvent) and kind.__module__ == module.__name__):
            continue
        texts = [(name, words[kind.__name__].get(name, "")) for name in kind.__struct_fields__]
        fields = ", ".join(f"`{name}`" + (f" ({text})" if text else "") for name, text in texts)
        lines.append(f"| `{name_of(kind)}` | {' '.join(str(kind.__doc__).split())} | {fields} |")
    return "\n".join([*lines, ""])


def events_page() -> str:
    """The page with its tables made anew; the text around them is written by hand."""
    page = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    before, _, rest = page.partition("\n## Supervisor\n")
    _, heading, after = rest.partition("\n## Clocks\n")
    sections = [
        before,
        "## Supervisor\n",
        events_table(supervisor_events),
        "## Agent\n",
        events_table(agent_events),
        "## Coordinator\n\nOne of the agents coordinates the rounds; its events stand in its own file.\n",
        events_table(coordinator_events),
    ]
    return "\n".join(sections) + heading + after


PAGES = {
    "docs/reference/python.md": python_page,
    "docs/reference/events.md": events_page,
    "docs/reference/cli.md": cli_page,
    "docs/reference/configuration.md": configuration_page,
    "docs/reference/states.md": states_page,
    "docs/reference/signals.md": signals_page,
    "docs/reference/known-failures.md": known_failures_page,
}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
