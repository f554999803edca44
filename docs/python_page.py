"""docs/reference/python.md, made of signatures and docstrings by docs/generate.py. Nothing is imported: no torch."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INTRODUCTION = """\
# Python

<!-- Written by docs/generate.py from the docstrings; do not edit. -->

What a program may import; all else can change at any time. `python -c "help(…)"` shows the docstrings whole. How-to
pages: [hangs](../how-to/find-hangs.md), [saving
before the end](../how-to/save-and-resume.md#save-before-the-job-ends), [submitting
functions](../how-to/from-submitit.md), [agents](../how-to/use-agents-from-python.md), [torchrun's
rendezvous](../reference/rendezvous.md), [restarts within a process](../how-to/restart-in-process.md).
"""
SECTIONS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "In a training script",
        "Without torch; outside of a run they do nothing, and `commit` renames.",
        (
            ("hpc_elastic", "worker_api/heartbeat.py:heartbeat section checkpoint_done"),
            ("hpc_elastic", "checkpoints/folders.py:checkpoint_dir latest_checkpoint"),
            ("hpc_elastic", "worker_api/lease.py:commit RoundOverError"),
            (
                "hpc_elastic",
                "worker_api/preemption.py:should_checkpoint on_preemption preemption_notice PreemptionNotice",
            ),
        ),
    ),
    (
        "In a script of a training framework",
        "Each module imports its framework.",
        (
            ("hpc_elastic.integrations.transformers", "integrations/transformers.py:ElasticCallback"),
            ("hpc_elastic.integrations.lightning", "integrations/lightning.py:ElasticCallback"),
            ("hpc_elastic.integrations.accelerate", "integrations/accelerate.py:ElasticCallback"),
            ("hpc_elastic.integrations", "integrations/checkpoints.py:last_whole_checkpoint"),
        ),
    ),
    (
        "Submit",
        "submitit is imported when they are first used.",
        (
            ("hpc_elastic.submission", "submission/executor.py:ElasticExecutor"),
            ("hpc_elastic.submission", "submission/job.py:ElasticJob"),
            ("hpc_elastic.submission", "submission/call.py:Script Module Command"),
            ("hpc_elastic.submission", "submission/environment.py:ElasticJobFailedError ElasticJobUncompletedError"),
        ),
    ),
    (
        "Agents",
        "With torch elastic's names, without torch.",
        (
            ("hpc_elastic.agent", "agent/supervision.py:WorkerSpec"),
            ("hpc_elastic.agent", "agent/elastic_agent.py:ElasticAgent SimpleElasticAgent"),
            ("hpc_elastic.agent", "agent/local_agent.py:LocalElasticAgent"),
            (
                "hpc_elastic.agent",
                "agent/supervision.py:RunResult MonitorResult Worker WorkerGroup WorkerGroupFailureError",
            ),
            ("hpc_elastic.agent", "agent/supervision.py:WorkerState"),
            ("hpc_elastic.agent.metrics", "agent/metrics.py:PrometheusMetrics"),
            ("hpc_elastic.rendezvous.handler", "rendezvous/handler.py:FileRendezvousHandler"),
            ("hpc_elastic.rendezvous.handler_config", "rendezvous/handler_config.py:config_from_url"),
            ("hpc_elastic.failures", "failures/error_handler.py:record ChildFailedError ProcessFailure"),
        ),
    ),
    (
        "A store for torch",
        "It imports torch.",
        (("hpc_elastic.pytorch.file_system_store", "pytorch/file_system_store.py:FileSystemStore"),),
    ),
    (
        "Restarts within a process",
        "`import hpc_elastic.inprocess as inprocess` imports torch. The names are NVIDIA's (resiliency extension 0.2),"
        " whose manual has the hooks. `help(…)` says what is different here.",
        (
            ("hpc_elastic.inprocess", "inprocess/wrap.py:Wrapper CallWrapper"),
            ("hpc_elastic.inprocess", "inprocess/hooks.py:Compose"),
            ("hpc_elastic.inprocess.initialize", "inprocess/hooks.py:Initialize RetryController"),
            ("hpc_elastic.inprocess.finalize", "inprocess/hooks.py:Finalize ThreadedFinalize"),
            ("hpc_elastic.inprocess.health_check", "inprocess/hooks.py:HealthCheck CudaHealthCheck FaultCounter"),
            (
                "hpc_elastic.inprocess.rank_filter",
                "inprocess/hooks.py:RankFilter MaxActiveWorldSize WorldSizeDivisibleBy",
            ),
            (
                "hpc_elastic.inprocess.rank_assignment",
                "inprocess/hooks.py:RankAssignment ShiftRanks FillGaps FilterGroupedByKey",
            ),
            ("hpc_elastic.inprocess.abort", "inprocess/abort.py:Abort AbortTorchDistributed"),
            ("hpc_elastic.inprocess.store", "inprocess/store.py:TCPStore FileStore SharedFileStore PrefixStore"),
            ("hpc_elastic.inprocess.exception", "inprocess/state.py:RestartError RestartAbort HealthCheckError"),
        ),
    ),
)
"""Heading, introduction, and by where it is imported from: the file and the names in it."""
NAMES_OF_OTHERS = ("hpc_elastic.failures", "hpc_elastic.pytorch", "hpc_elastic.agent", "hpc_elastic.submission")
HOOKS_OF_OTHERS = ("hpc_elastic.inprocess.",)
"""Arguments and methods are those of torch, submitit and NVIDIA's extension, whose manuals have them."""

Callable_ = ast.FunctionDef | ast.AsyncFunctionDef
_GOOGLE = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note):(.*)$")
_ITEM = re.compile(r"^(?P<name>\*{0,2}[\w.]+(?:, [\w.]+)*(?: \([^)]*\))?): (?P<text>.*)$", re.DOTALL)


def names() -> list[str]:
    """The full name of everything on the page."""
    return [f"{module}.{name}" for _, _, rows in SECTIONS for module, where in rows for name in _split(where)[1]]


def python_page() -> str:
    parts = [INTRODUCTION]
    for heading, introduction, rows in SECTIONS:
        parts.append(f"## {heading}\n\n{introduction}\n")
        for module, where in rows:
            file, objects = _split(where)
            tree = ast.parse((ROOT / "hpc_elastic" / file).read_text(encoding="utf-8"))
            found = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, Callable_))}
            if module.startswith(HOOKS_OF_OTHERS):
                parts.append(f"- `{module}`: " + ", ".join(f"`{name}`" for name in objects))
            else:
                parts += [_object(module, found[name]) for name in objects]
        parts += [""] if parts[-1].startswith("- ") else []
    return re.sub(r"^(- .*\n)(?=###)", r"\1\n", "\n".join(parts), flags=re.MULTILINE)


def _split(where: str) -> tuple[str, list[str]]:
    file, _, objects = where.partition(":")
    return file, objects.split()


def _object(module: str, node: ast.ClassDef | Callable_) -> str:
    if module.startswith(NAMES_OF_OTHERS):
        return f"- `{module}.{node.name}`" + (f": {_summary(node)}" if _summary(node) else "")
    title = f"### {module}.{node.name}\n"
    if not isinstance(node, ast.ClassDef):
        return f"{title}\n```py\n{_signature(node.name, node)}\n```\n\n{_text(node)}"
    members = [member for member in node.body if isinstance(member, Callable_)]
    init = next((member for member in members if member.name == "__init__"), None)
    shown = _signature(node.name, init) if init is not None else _fields(node)
    texts = [_text(node)] + ([_text(init, summary=False)] if init is not None and ast.get_docstring(init) else [])
    texts = [text for text in texts if text.strip()]
    public = [
        member for member in members
        if not member.name.startswith("_") and ast.get_docstring(member) and not _is_setter(member)
    ]  # fmt: skip
    rows = [f"- `{_member(member)}`: {_sentence(member)}" for member in public]
    return "\n".join([f"{title}\n```py\n{shown}\n```\n", *texts, *rows, *([""] if rows else [])])


def _fields(node: ast.ClassDef) -> str:
    """A record's or an enumeration's members, or a class that has no constructor of its own."""
    lines = []
    for statement in node.body:
        if isinstance(statement, (ast.AnnAssign, ast.Assign)) and not ast.unparse(statement).startswith(
            ("_", "template")
        ):
            lines.append(f"    {_source(statement)}")
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    return "\n".join([f"class {node.name}" + (f"({bases})" if bases else "") + (":" if lines else ""), *lines])


def _source(node: ast.AST) -> str:
    """With double quotes, as the code has them, and as a formatter of the page would write them."""
    return re.sub(r"'((?:[^'\"\\]|\\.)*)'", r'"\1"', ast.unparse(node))


def _is_setter(node: Callable_) -> bool:
    return any(isinstance(decorator, ast.Attribute) for decorator in node.decorator_list)


def _member(node: Callable_) -> str:
    if any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list):
        return node.name
    plain, named = (argument.arg for argument in node.args.args[1:]), (f"{a.arg}=…" for a in node.args.kwonlyargs)
    return f"{node.name}({', '.join([*plain, *named])})"


def _signature(name: str, node: Callable_) -> str:
    """In one line, or a line for each parameter; without ``self``."""
    arguments = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(arguments, Callable_)
    given = arguments.args
    for plain in (given.posonlyargs, given.args):
        if plain and plain[0].arg in ("self", "cls"):
            del plain[0]
            break
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    parts = _parameters(given)
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _parameters(given: ast.arguments) -> list[str]:
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    parts = [_parameter(argument, default) for argument, default in zip(plain, defaults, strict=True)]
    if given.vararg is not None:
        parts.append(f"*{ast.unparse(given.vararg)}")
    elif given.kwonlyargs:
        parts.append("*")
    parts += [_parameter(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return parts + ([f"**{ast.unparse(given.kwarg)}"] if given.kwarg is not None else [])


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return _source(argument) + (f" = {_source(default)}" if default is not None else "")


def _sentence(node: Callable_) -> str:
    """The first sentence of a docstring."""
    return re.split(r"(?<=[.)])\s+(?=[A-Z])", _summary(node), maxsplit=1)[0]


def _summary(node: ast.ClassDef | Callable_) -> str:
    """A docstring's first paragraph, in one line."""
    return _markdown(" ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split()))


def _text(node: ast.ClassDef | Callable_, *, summary: bool = True) -> str:
    """A docstring's first paragraph, its example and its arguments, as Markdown."""
    lines: list[str] = []
    section: list[str] | None = None
    text = ast.get_docstring(node) or ""
    paragraphs = re.split(r"\n\n(?=\S)", text)
    paragraphs[0] = re.sub(r"::\n.*", ".", paragraphs[0], flags=re.DOTALL)  # an example is on a how-to page
    kept = [part for part in paragraphs if re.match(r"(?:Args|Attributes):", part)]
    text = "\n\n".join((paragraphs[:1] if summary and paragraphs[0] not in kept else []) + kept)
    if _GOOGLE.match(text.partition("\n")[0]):  # then what follows is not indented
        text = re.sub(r"^(?!\w+:$)(?=.)", "    ", text, flags=re.MULTILINE)
    for line in text.splitlines():
        match = _GOOGLE.match(line)
        if match is not None:
            section = _finish(lines, section)
            lines.append("")
            section = []
        elif section is not None and (line.startswith(" ") or not line):
            section.append(line)
        else:
            section = _finish(lines, section)
            lines.append(line)
    _finish(lines, section)
    return re.sub(r"\n{3,}", "\n\n", _markdown("\n".join(lines).strip())) + "\n"


def _finish(lines: list[str], section: list[str] | None) -> None:
    """Add a section's body: a list where its lines are ``name: text``."""
    if section is None:
        return
    items: list[str] = []
    for line in textwrap.dedent("\n".join(section)).strip("\n").splitlines():
        if line.startswith(" ") and items:
            items[-1] += f" {line.strip()}"
        elif line:
            items.append(line)
    for item in items:
        match = _ITEM.match(item)
        lines.append(f"- `{match['name']}`: {match['text']}" if match is not None else item)
    lines.append("")


def _markdown(text: str) -> str:
    """reStructuredText's marks in Markdown's: double backticks, and an example after a double colon."""
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    parts = re.split(r"::\n\n((?:(?: {4}.*)?\n?)+)", text)
    return "".join(
        f":\n\n```py\n{textwrap.dedent(part).strip()}\n```\n\n" if index % 2 else part
        for index, part in enumerate(parts)
    )
