"""Writes the pages of docs/reference that follow from the code: cli, configuration, exit codes, python …

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
import re
import sys
import textwrap
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, whatever else is installed

from docs.python_page import python_page  # noqa: E402
from hpc_elastic.agent import supervision  # noqa: E402
from hpc_elastic.agent.supervision import Phase  # noqa: E402
from hpc_elastic.cli import main as cli  # noqa: E402
from hpc_elastic.failures import patterns  # noqa: E402
from hpc_elastic.launch import site  # noqa: E402
from hpc_elastic.options.run_request import ALL_OPTIONS  # noqa: E402
from hpc_elastic.options.table import Keys, key_of  # noqa: E402
from hpc_elastic.rendezvous import state as rendezvous_state  # noqa: E402
from hpc_elastic.rendezvous.state import Status  # noqa: E402
from hpc_elastic.run import agent_events, control_events  # noqa: E402
from hpc_elastic.run.events import NOTES, AgentEvent, CoordinatorEvent, RunEvent, SupervisorEvent, name_of  # noqa: E402


def _life() -> ModuleType:
    """The in-process restart group's table, without its package: that imports torch."""
    spec = importlib.util.spec_from_file_location("state", ROOT / "hpc_elastic" / "inprocess" / "state.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


life = _life()

WIDTH = 88
"""Of a code block's line."""
CLI_INTRODUCTION = """\
# Command line

<!-- Written by docs/generate.py; do not edit. -->

Long options are taken with `-` and with `_`. The script, or `--`, ends our options: what follows is the script's own,
untouched. A variable in brackets, as in `[PET_NNODES]`, gives the value where the option is not there. Wrong usage is
one line on stderr and exit code 2; the other codes are [here](exit-codes.md).

Commands that take a RUN understand a run id or its beginning, a Slurm job id, and the directory of a run or an attempt.
Without one, or with `latest`, `report`, `logs` and `status` take the last run of this folder, else of this account.
`--runs-dir DIR` is the folder of the runs (default: from the configuration, else ./runs).
"""

CONFIGURATION_INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate.py from the tables of options in hpc_elastic/options/; do not edit. -->

Every option of `submit` and `run` can also be given in files and variables. A later layer wins:

1. defaults, as below
2. the site's file: the first `hpc_elastic/config.toml` in `$XDG_CONFIG_DIRS` (default `/etc/xdg`)
3. the user's file: `$XDG_CONFIG_HOME/hpc_elastic/config.toml` (default `~/.config`)
4. the project's file: `hpc_elastic.toml`, or `[tool.hpc-elastic]` in `pyproject.toml`, the first from the working
   directory upwards, as far as the folder with `.git` or your home
5. a profile: the tables `[profile.NAME]` of these files, if `--profile NAME`, `$HPC_ELASTIC_PROFILE` or a file's
   `default-profile = "NAME"` names it
6. the environment: `HPC_ELASTIC_...` as below, else torchrun's `PET_...` or sbatch's `SBATCH_...`
7. the [command line](cli.md), or in Python the arguments

`$HPC_ELASTIC_SITE_CONFIG`, `$HPC_ELASTIC_USER_CONFIG` and `$HPC_ELASTIC_PROJECT_CONFIG` name another file for a
layer; an empty value means no file. A value replaces those of lower layers whole, lists too. An empty string, an
empty list and `exclusive = false` remove an option. sbatch's other options are keys and variables as well: `licenses
= "matlab:2"`.

`hpc-elastic config` shows every value and where it comes from; `--json` has `profile`, `files` (`layer`, `path`,
`state`), and in `settings` by key the `value`, `layer`, `where` and `profile`. An unknown key, a value of the wrong
type and a refused value are one line on stderr, and exit code 2.

Keys are written with `-` or `_`. Values are TOML's; an option that may be repeated takes an array of strings. `~` and
`$NAME` are expanded in `runs-dir`, `chdir`, `python` and `template`. Relative paths of a project's file are relative to
that file, others to the working directory.

A file is executed in your name. It, and each link to it, must belong to you or root, and must not be writable for
everybody; any other file is refused. Root reads root's files only. A stranger's `pyproject.toml` without our table is
ignored. A file has at most 256 KiB, a key at most 16 parts. `submit` and `run` show on stderr the keys of files that
decide what is executed, such as `python` and `template`.

Agents and workers read none of this: a run's values are in its run.json.

## Keys

A key is the long name of an option, which [the command line](cli.md#submit) explains, with its default. Its variable is
`HPC_ELASTIC_` and its name: `max-restarts` is `HPC_ELASTIC_MAX_RESTARTS`.
"""

SIGNALS_INTRODUCTION = """\
## Signals

<!-- Written from here on by docs/generate.py, from the tables in hpc_elastic/launch/site.py,
hpc_elastic/rendezvous/state.py, hpc_elastic/agent/supervision.py and hpc_elastic/inprocess/state.py; do not edit. -->

Slurm sends SIGTERM at the beginning and the end of a preemption's grace time, at the time limit, at a cancel and at a
requeue. The supervisor asks Slurm about the job (for at most 2 s), and this table decides. *save*: workers get the
[notice](../how-to/save-and-resume.md#save-before-the-job-ends) with the time that is left. *end*: workers are ended
within KillWait. A later signal changes this if it ends the job sooner. An agent that hears nothing from the supervisor
for 4 s (or half of KillWait) takes SIGUSR2 for a notice of `--grace` seconds, and SIGTERM for the end.

| signal | Slurm: the job … | it is a | workers | who requeues |
|---|---|---|---|---|
"""

SIGNALS_END = """
The supervisor also looks at the job itself: at its start, and `--grace` seconds before the limit (at most a quarter of
it), because a notice may be lost or not asked for. A requeue counts for `--max-requeues`. A job that is cancelled while
an attempt ends does not come back.
"""

KNOWN_INTRODUCTION = """\
# Known failures

<!-- Written by docs/generate.py from the tables in hpc_elastic/failures/patterns.py; do not edit. -->

These texts are searched in an exception and in what it was raised from, else in the last lines of stderr. Case does not
matter, and `*` stands for at most 200 characters of a line. One text of each is shown; hpc_elastic/failures/patterns.py
has all, in the order in which they count. A *symptom* is what a healthy rank reports when another one is gone; *root*
is a candidate for the cause; *infrastructure* is not the script's. *final*: another try would not help. *suspect*: the
node's hardware is.

The place where an exception was raised decides before its text. A symptom needs a type, an innermost frame or a text of
torch's process group, gloo or NCCL. An error text of the system ("no space left on device") in a message of the script
needs the error's number. The first of chained exceptions decides.
"""


def help_text(*arguments: str, option: str = "--help") -> str:
    """What ``--help`` or ``--help-all`` prints, at a fixed width."""
    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main([*arguments, option])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    lines = [line for line in printed.getvalue().rstrip("\n").splitlines() if not line.startswith("  -h, --help")]
    return "\n".join(_fitted(line) for line in lines).replace("\nOptions:\n\n", "\n")


def _fitted(line: str) -> str:
    """A line of a help text in the page's width: choices without blanks go on below."""
    line = line if len(line) <= WIDTH else line.replace("|", "| ")
    text = textwrap.fill(line, WIDTH, subsequent_indent=" " * 14, break_long_words=False, break_on_hyphens=False)
    return text.replace("| ", "|")


def cli_page() -> str:
    parts = [CLI_INTRODUCTION, f"```text\n{help_text()}\n```\n"]
    known = set(_entries(help_text("submit", option="--help-all")))
    for name, (_, text) in cli._SUBCOMMANDS.items():
        if text.startswith("the same as "):
            other = text.rpartition(" ")[2]
            parts.append(f"## {name}\n\nThe same as [{other}](#{other}).\n")
            continue
        shown = help_text(name, option="--help-all" if name in ("submit", "run", "agent") else "--help")
        shown = re.sub(r"\n\nexamples:\n(?:  [^\n]*\n?)+", "\n", shown).rstrip()  # how-to pages have more
        shown = re.sub(r"\n\nLong options are taken with .*", "", shown, flags=re.DOTALL) if name == "submit" else shown
        shown = shown.replace(f"\n\n  {textwrap.fill(text, 76, subsequent_indent='  ')}", "")  # it is in the list above
        if name != "submit":
            shown = re.sub(r"\n  --runs-dir DIR +folder of the runs[^)]*\)", "", shown)
            shown = re.sub(r"\n\n  RUN: run id or.*?(?=\n\n|\Z)", "", shown, flags=re.DOTALL)
            shown = shown.removesuffix("\nOptions:").rstrip()
            shown = re.sub(r"\n\nLong options are taken .*", "", _without(shown, known), flags=re.DOTALL) + (
                "\n\nand options of submit." if "Long options are taken" in shown else ""
            )
        parts.append(f"## {name}\n\n```text\n{shown}\n```\n")
    return "\n".join(parts)


def _entries(text: str) -> list[str]:
    """The options of a help text, each with the lines of its explanation as one."""
    return [" ".join(entry.split()) for entry in re.findall(_ENTRY, text)]


def _without(text: str, known: set[str]) -> str:
    """A help text without the options that `submit` explains in the same words, and without headings left empty."""
    left = re.sub(_ENTRY, lambda match: "" if " ".join(match[0].split()) in known else match[0], text)
    if left == text:
        return text
    left = re.sub(r"^\S[^\n]*:\n(?=\n|\Z)", "", left, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", left).rstrip()


_ENTRY = re.compile(r"^  -[^\n]*\n?(?:^   [^\n]*\n?)*", re.MULTILINE)
"""An option in a help text, with its lines."""


def configuration_page() -> str:
    """Every key, by the form of its value. What it means is on the page of the command line."""
    plain, several, switches = [], [], []
    for option in Keys(ALL_OPTIONS).options():
        if option.in_files and option.help:
            kind = switches if option.metavar is None else several if option.repeatable else plain
            kind.append(f"`{key_of(option)}`")
    lists = (("Text or a number (`exclusive`: also true)", plain), ("True or false", switches), ("An array", several))
    return "\n".join([CONFIGURATION_INTRODUCTION, *(f"- {form}: {', '.join(keys)}" for form, keys in lists), ""])


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


def exit_codes_page() -> str:
    """The exit codes, which are written by hand, and from the tables the signals and the states."""
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text(encoding="utf-8")
    return "\n".join(
        [
            page.partition("\n## Signals\n")[0],
            signals_section(),
            "## States\n\nAn event that has no arrow in a state is refused.\n",
            "### A rendezvous\n\nThe log of a run's rounds; the coordinator alone writes it.\n",
            diagram(rendezvous_state.TRANSITIONS, Status.JOINABLE),
            "### An agent\n",
            diagram(supervision.TRANSITIONS, Phase.JOINING),
            "### A rank of a wrapped call\n\nA rank that [restarts in its process](../how-to/restart-in-process.md).\n",
            diagram(life.TRANSITIONS, life.CallPhase.JOINING),
        ]
    )


def signals_section() -> str:
    """The table, with equal rows of several of Slurm's answers, or of both hearers, in one."""
    said: dict[tuple[str, tuple[str, ...], site.Reaction], list[str]] = {}
    for call, halves in site.TABLE.items():
        for condition in site.JobCondition:
            found: dict[site.Reaction, list[str]] = {}
            for heard_by, rows in halves.items():
                if condition in rows:
                    found.setdefault(rows[condition], []).append(heard_by.value)
            for row, hearers in found.items():
                said.setdefault((call.value, tuple(hearers), row), []).append(condition.value)
    lines = []
    for (call_text, by, row), words in said.items():
        who = "" if len(by) == len(site.HeardBy) else f" ({by[0]})"
        saves = f"save, until {row.deadline.value}" if row.saves else "end"
        asked = "any answer" if len(words) == len(site.JobCondition) else "; ".join(words)
        lines.append(f"| {call_text}{who} | {asked} | {row.meaning.value} | {saves} | {_who_requeues(row, words)} |")
    return SIGNALS_INTRODUCTION + "\n".join(lines) + "\n" + SIGNALS_END


def _who_requeues(row: site.Reaction, words: list[str]) -> str:
    if row.meaning is site.Meaning.CANCEL:
        return "–"
    return "Slurm" if words == [site.JobCondition.REQUEUED.value] else "the run"


def known_failures_page() -> str:
    """What is known, by class, each with a text of it."""
    texts: dict[str, dict[str, list[str]]] = {}
    for row in patterns.PATTERNS:
        kind = row.failure_class.value + (f", {row.category.value}" if row.category is not None else "")
        kind += ("" if row.retryable else ", final") + (", suspect" if row.node_suspect else "")
        texts.setdefault(kind, {}).setdefault(row.says, []).append(f"`{row.any_of[0]}`")
    for name, says in patterns.SYMPTOM_TYPES.items():
        texts.setdefault("symptom", {}).setdefault(says, []).append(f"`{name}` of torch's process group")
    xids: dict[str, dict[str, list[str]]] = {}
    for number, (failure_class, suspect, says) in patterns.XIDS.items():
        kind = failure_class.value + (", suspect" if suspect else "")
        xids.setdefault(kind, {}).setdefault(says, []).append(str(number))
    lines = []
    for kind, found in texts.items():
        lines += [f"### {kind}\n", *(f"- {says}: {', '.join(shown)}" for says, shown in found.items()), ""]
    lines.append("## The GPU driver's Xid\n\nThe most telling one counts; others than these are infrastructure.\n")
    for kind, found in xids.items():
        lines += [f"### Xid: {kind}\n", *(f"- {says}: {', '.join(shown)}" for says, shown in found.items()), ""]
    return "\n".join([KNOWN_INTRODUCTION, "## Texts\n", *lines, VERDICTS_INTRODUCTION, verdicts_table(), ""])


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

The calibration catalogue (tests/verdicts) has failures that really happen, each on 2 nodes with 2 workers. *Right* is a
report that names the rank or the node and what happened there, as it was written down before the run; *honest* is one
that says that the cause is not known and names no wrong rank; all others are *wrong*. `python -m tests.check --tier
verdicts` runs the catalogue.
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


COMMON_FIELDS = ("round", "reason", "restarts_used", "node", "host", "name")
"""They are in many events, and are left out unless a text says more; the page explains them once."""


def events_table(module: ModuleType, writers: type[RunEvent]) -> str:
    """The events of a module that one kind of writer writes, one an item: what each says, and its fields."""
    words = words_of_fields(Path(str(module.__file__)))
    lines = []
    for kind in vars(module).values():
        if not (isinstance(kind, type) and issubclass(kind, writers) and kind.__module__ == module.__name__):
            continue
        names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
        texts = [(shown, words[kind.__name__].get(name, "")) for name, shown in names]
        texts = [(name, text) for name, text in texts if text or name not in COMMON_FIELDS]
        fields = ", ".join(f"`{name}`" + (f" ({text})" if text else "") for name, text in texts)
        if name_of(kind) == "worker_failed":
            fields = "Fields: those of the [error file](json.md#the-error-file); `rank` is `global_rank` there"
        lines.append(f"- **`{name_of(kind)}`**: {' '.join(str(kind.__doc__).split())}{f' {fields}' if fields else ''}")
    return "\n".join([*lines, ""])


def events_page() -> str:
    """The page with its tables made anew; the text around them is written by hand."""
    page = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    before, _, rest = page.partition("\n## Supervisor\n")
    _, heading, after = rest.partition("\n## Clocks\n")
    sections = [
        before,
        "## Supervisor\n",
        events_table(control_events, SupervisorEvent),
        "## Agent\n",
        events_table(agent_events, AgentEvent),
        "## Coordinator\n\nIts events are in the file of the agent that coordinates.\n",
        events_table(control_events, CoordinatorEvent),
        "## Notes\n",
        "An event `note` is for people: `subject`, one of these, `text`, and it may have `reason` and `round`. `logs`",
        "shows the subject as the name, and `--event` finds it by that.\n",
        *(f"- **`{subject}`**: {text}" for subject, text in NOTES.items()),
        "",
    ]
    return "\n".join(sections) + heading + after


PAGES = {
    "docs/reference/python.md": python_page,
    "docs/reference/events.md": events_page,
    "docs/reference/cli.md": cli_page,
    "docs/reference/configuration.md": configuration_page,
    "docs/reference/exit-codes.md": exit_codes_page,
    "docs/reference/known-failures.md": known_failures_page,
}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
