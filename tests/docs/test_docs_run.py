"""The commands, files and Python of the documentation are run, as far as a machine without a cluster can."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpc_elastic
from docs import python_page
from hpc_elastic.base.files import make_private_dir
from hpc_elastic.cli import main as cli
from hpc_elastic.options.config_files import read_settings
from hpc_elastic.options.run_request import ALL_OPTIONS
from hpc_elastic.options.table import Keys
from hpc_elastic.run import index as run_index
from hpc_elastic.run.paths import StoredResult
from tests.rigs.run_builder import START_NS, RunBuilder, make_failure

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
JOB, OTHER_JOBS = "4711", ("70", "70_3")
RUN_ID = "20261121-053000-train-9f3c"
ELSEWHERE = ("cancel", "requeue", "clean", "convert", "hangs", "completion", "doctor", "rehearse")
"""What needs a job that runs (tests/slurm), what would remove the run of the others, what wants files
(tests/unit/options, tests/unit/failures), and what has tests of its own (tests/integration)."""


def blocks(page: Path, language: str) -> list[str]:
    """In fences, be they within a list."""
    fence = rf"^(?P<indent> {{0,6}})```{language}\n(?P<text>.*?)^(?P=indent)```$"
    found = re.finditer(fence, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(match["text"]) for match in found]


def commands(page: Path) -> list[str]:
    """Every whole command of ours: after a prompt, in a script, in a block without a language, or in a line's text."""
    text = re.sub(r"^```(text|python|toml)$.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = re.findall(r"^(?:\$ )?(hpc-elastic .*)$", text.replace("\\\n", " "), re.MULTILINE)
    found += re.findall(r"(?<!`)`(hpc-elastic [^`]*(?:train\.py|RUN|JOBID|4711)[^`]*)`", text)
    return list(dict.fromkeys(found))


def shown_with_output(page: Path) -> list[str]:
    """The last command before each output that tests/docs/test_docs_output.py holds to a real run."""
    return re.findall(r"^\$ (hpc-elastic .*)\n```\n\n<!-- output: ", page.read_text(encoding="utf-8"), re.MULTILINE)


def all_commands(*names: str) -> list[tuple[str, str]]:
    """Page and command, of these subcommands."""
    return [
        (str(page.relative_to(ROOT)), command)
        for page in PAGES
        for command in commands(page)
        if command.split()[1] in names
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with a script, a site's file as the how-to gives it, and a run that has ended."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "train.py").write_text("import os\nprint('rank', os.environ['RANK'], flush=True)\n")
    (template,) = (t for t in blocks(ROOT / "docs/how-to/submit-to-slurm.md", "bash") if "@SBATCH_LINES@" in t)
    (folder / "gpu.sbatch").write_text(template)
    (folder / "docs").symlink_to(ROOT / "docs")
    (folder / "site.toml").write_text(blocks(ROOT / "docs/how-to/configure.md", "toml")[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_ELASTIC_SITE_CONFIG", str(folder / "site.toml"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "PET_"))]:
            patch.delenv(name)
        patch.setenv("PWD", str(folder))
        patch.chdir(folder)
        _ended_run(folder)
        yield folder


def _ended_run(folder: Path) -> None:
    """Four nodes with four ranks each; the last one fails in round 1, and rounds 0 to 2 have all printed."""
    make_private_dir(folder / "runs")
    builder = RunBuilder(folder / "runs" / RUN_ID, nodes=4, per_node=4)
    builder.attempt(0, job_id=JOB)
    for node in range(4):
        builder.event(0, "agent", node, 1, "agent_started", pid=1, version="0.1.0")
    for index in range(3):
        builder.round(0, index, at=10 + 100 * index)
        for rank in range(16):
            output = builder.paths.attempt(0).rank(index, rank).root
            for path in (output.parent.parent, output.parent, output):
                make_private_dir(path)
            (output / "stdout.log").write_text(f"line of {rank}\n")
            (output / "stderr.log").write_text(f"warning of {rank}\n")
        if index < 2:
            builder.fail(
                make_failure(
                    11, at=60 + 100 * index, exception="ValueError: x", exitcode=1, per_node=4, round_index=index
                )
            )
            builder.stopped(0, index, at=61 + 100 * index)
    builder.succeeded(0, 2, at=280)
    builder.event(0, "agent", 2, 281, "node_lost", round=2, age=8.0, reason="n3 stopped its heartbeat")
    builder.end(0, at=282, outcome="succeeded", code=0, reason="all workers ended with 0")
    result = StoredResult(outcome="succeeded", reason="", exit_code=0, action="end", decision="the run succeeded")
    result.save(builder.paths.attempt(0).result_json)
    for job in (JOB, *OTHER_JOBS):
        problem = run_index.record(cluster="", job_id=job, submitted_ns=START_NS, run_dir=builder.paths.root)
        assert problem is None


@pytest.mark.parametrize(("page", "command"), all_commands("submit", "run", "config"))
def test_what_starts_runs_would_start_them(
    place: Path, page: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, name, *argv = shlex.split(os.path.expandvars(command), comments=True)
    if name == "config":
        assert cli.main([name, *argv]) == 0
        return
    if not any(word.endswith("train.py") or word.startswith("docs/examples/") for word in argv):
        pytest.skip("tells of options, and starts nothing")
    local = name == "run" or "--cluster" in argv
    where = ["--cluster=local"] if local else ["--cluster=slurm", "--allow-local-runs-dir"]
    assert cli.main(["submit", "--dry-run", *where, *argv]) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    assert "error" not in printed.err
    assert "means nothing" not in printed.err
    assert ("run directory" if local else "#SBATCH --requeue") in printed.out


def test_a_run_that_is_typed_really_runs(place: Path) -> None:
    """Those of the user's own script; the examples' are run by tests/integration, and an output is held elsewhere."""
    typed = {command for _, command in all_commands("run") if "train.py" in command and "docs/examples" not in command}
    typed -= {command for page in PAGES for command in shown_with_output(page)}
    assert typed
    started = {
        command: subprocess.Popen(
            # Where the page means an allocation, all is done on this machine.
            [sys.executable, "-m", "hpc_elastic", "run", "--cluster=local", *shlex.split(command, comments=True)[2:]],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for command in sorted(typed)
    }  # fmt: skip
    for command, process in started.items():
        try:
            output, _ = process.communicate(timeout=240)
        finally:
            process.kill()
        assert process.returncode == 0, command + output
        assert "rank 0" in output


@pytest.mark.parametrize(("page", "command"), all_commands("report", "logs", "status", "list"))
def test_what_looks_at_runs_shows_them(
    place: Path, page: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [re.sub(r"^(RUN|JOBID)$", JOB, word) for word in shlex.split(command, comments=True)[1:]]
    if len(argv) == 1 and argv[0] != "list":
        pytest.skip("only the subcommand's name")
    assert cli.main(argv) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_subcommands_that_are_told_of_are_all_run_somewhere() -> None:
    run_here = {"submit", "run", "config", "report", "logs", "status", "list"}
    assert set(cli._SUBCOMMANDS) - run_here - set(ELSEWHERE) == {"agent"}
    assert len(all_commands(*run_here)) >= 40


@pytest.mark.parametrize(
    ("page", "text"),
    [(page, text) for page in PAGES for text in blocks(page, "toml")],
    ids=lambda value: str(value)[-30:],
)
def test_configuration_files_are_understood(tmp_path: Path, page: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    settings = read_settings(path, Keys(ALL_OPTIONS))
    assert settings is not None
    assert settings.base or settings.profiles


@pytest.mark.parametrize(
    ("page", "text"),
    [(page, text) for page in PAGES for language in ("bash", "sh") for text in blocks(page, language)],
    ids=lambda value: str(value)[-30:],
)
def test_shell_is_shell(page: Path, text: str) -> None:
    result = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


class _Model:
    """Whatever a page's example does with its own things."""

    def __call__(self, *_: Any, **__: Any) -> None: ...


def python_blocks() -> list[tuple[str, str]]:
    """Page and source: in fences, or indented by four blanks."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [(page.name, block) for block in blocks(page, "python")]
        plain = re.sub(r"^( {0,6})```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", plain, re.MULTILINE):
            if re.search(r"^    (from|import|except|def|class) ", block, re.MULTILINE):
                found.append((page.name, block))
    return found


TAKES_MORE = {
    "checkpoints.md": "a group of ranks: tests/integration/test_local_run_checkpoints.py",
    "from-submitit.md": "jobs: test_programs_that_submit_run, and tests/integration/test_submission_*",
    "restart-in-process.md": "a group of ranks: test_a_wrapped_function_restarts, tests/integration/test_inprocess_*",
    "rendezvous.md": "a shared folder, and several processes: tests/integration/test_torch*",
    "use-agents-from-python.md": "test_a_program_that_is_an_agent_runs, tests/integration/test_local_elastic_agent.py",
}
"""Pages whose Python needs more than a process, and who runs the like; here its names are looked up."""
FRAMEWORKS = ("accelerate", "lightning", "transformers")
FRAMEWORKS_PAGE = "train-with.md"
"""Its Python needs a framework: tests/frameworks/scripts has the same lines, and runs them."""


def parsed(text: str) -> ast.Module:
    """A block. Raises SyntaxError where it is no Python, but for an ellipsis in place of a value."""
    source = textwrap.dedent(text).strip("\n")
    if source.startswith("except "):
        source = f"try:\n    pass\n{source}"
    return ast.parse(re.sub(r"=…|…", lambda match: "=0" if match[0][0] == "=" else "...", source))


@pytest.mark.parametrize(
    ("page", "text"),
    [found for found in python_blocks() if found[0] not in (*TAKES_MORE, FRAMEWORKS_PAGE)],
    ids=lambda value: str(value).strip()[:40],
)
def test_python_runs(page: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HPC_ELASTIC_")]:
        monkeypatch.delenv(name)
    nothing = _Model()
    names = {"train": nothing, "save": nothing, "start": 0, "step": 0, "steps": 3, "loader": range(3)}
    exec(compile(parsed(text), page, "exec"), {"__name__": "docs", "hpc_elastic": hpc_elastic, **names})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_frameworks_lines_import_what_its_script_imports(framework: str) -> None:
    script = ROOT / f"tests/frameworks/scripts/with_{framework}.py"
    imports = [line for line in script.read_text(encoding="utf-8").splitlines() if "hpc_elastic" in line]
    (text,) = [t for name, t in python_blocks() if name == FRAMEWORKS_PAGE and f"integrations.{framework} import" in t]
    found = [ast.unparse(node) for node in ast.walk(parsed(text)) if isinstance(node, ast.ImportFrom)]
    assert sorted(found) == sorted(imports)


SMALLER = {
    "nodes=4": "nodes=2", "tasks_per_node=8": "tasks_per_node=1", "elastic_min_nodes=3": "elastic_min_nodes=1",
    '"default", 8,': '"default", 2,', "min_workers=2": "min_workers=1", "max_workers=4": "max_workers=1",
}  # fmt: skip
"""A page's numbers, and those that this machine has room for."""


def as_program(page: str, before: str, after: str, **places: str) -> str:
    """A page's Python as one program of a user's, with what it takes for given before it."""
    texts = [textwrap.dedent(text).strip("\n") for name, text in python_blocks() if name == page]
    text = "\n\n".join(text for text in texts if not text.startswith("except "))
    for old, new in {**SMALLER, **places}.items():
        assert old in text or old in SMALLER, f"{page} does not say {old} any more"
        text = text.replace(old, new)
    return f"{before}\n{text}\n{after}\n"


def run_program(folder: Path, text: str) -> str:
    program = folder / "program.py"
    program.write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HPC_ELASTIC_", "SLURM_"))}
    result = subprocess.run(
        [sys.executable, str(program)],
        env={**env, "PYTHONPATH": str(ROOT), "HPC_ELASTIC_CLUSTER": "local", "XDG_STATE_HOME": str(folder / "state")},
        cwd=folder, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, text + result.stdout + result.stderr
    return result.stdout


def test_programs_that_submit_run(tmp_path: Path) -> None:
    """All of the page's in one, on this machine: functions, a script, a checkpoint's class, a notebook's cell."""
    (tmp_path / "train.py").write_text("import os, sys\nprint('script', os.environ['RANK'], sys.argv[1:])\n")
    said = run_program(
        tmp_path,
        as_program(
            "from-submitit.md",
            "import os\ndef train(epochs): return [int(os.environ['RANK']), epochs]\ndef train_one_epoch(): pass\n",
            "print('trained', job.result())\nprint('launched', results)\n",
            # Between two blocks nothing looks at what the script has said.
            **{"job.result()  # None, or what went wrong": "assert job.result() is None\nprint(job.stdout())"},
        ),
    )
    assert said.startswith("[0, 90]\n")
    for rank in (0, 1):
        assert f"script {rank} ['--epochs', '90']" in said
    assert "trained 90\n" in said
    assert said.endswith("launched [[0, 90], [1, 90]]\n")


def test_a_program_that_is_an_agent_runs(tmp_path: Path) -> None:
    text = as_program("use-agents-from-python.md", "", "", **{"/shared/dir/my-run": str(tmp_path / "my-run")})
    assert run_program(tmp_path, text) == "{'loss': 0.1}\n"


@pytest.mark.torch
def test_a_wrapped_function_restarts(tmp_path: Path) -> None:
    """On two ranks, with the page's fault in its first start; and then a ring over the page's store."""
    pytest.importorskip("torch")
    texts = [text for page, text in python_blocks() if page == "restart-in-process.md"]
    (wrapped,) = (text for text in texts if "@inprocess.Wrapper" in text)
    (fault,) = (text for text in texts if "inject_fault(" in text)
    (store,) = (text for text in texts if "SharedFileStore" in text)
    sooner = fault.replace("delay=(1.0, 5.0)", "delay=(0.2, 0.4)")
    assert sooner != fault
    body = "model = None\n"  # the page's dots
    body += f"if call.iteration == 0:\n{textwrap.indent(sooner, '    ')}\n    while True:\n        time.sleep(0.01)\n"
    body += (
        "total = torch.ones(1)\ndist.all_reduce(total)\nprint('sum', total.item(), 'in', call.iteration, flush=True)"
    )
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\nimport torch, torch.distributed as dist\n\n"
        + wrapped.replace("    ...\n", textwrap.indent(body, "    ") + "\n")
        + f"\nring = {store.replace('/shared/group-of-this-round', str(tmp_path / 'ring'))}"
        + "\nprint('met', ring(lambda: os.environ['RANK'])(), flush=True)\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "hpc_elastic", "run", "--cluster", "local", "--nproc-per-node", "2",
         "--restart-policy", "in-process", "--max-requeues", "0", str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")},
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    sums = re.findall(r"sum (\S+) in (\d+)", result.stdout)
    assert [total for total, _ in sums] == ["2.0", "2.0"], result.stdout
    assert all(int(iteration) >= 1 for _, iteration in sums), "the fault has come first"
    assert sorted(re.findall(r"met (\d)", result.stdout)) == ["0", "1"]


def test_python_names_what_there_is(tmp_path: Path) -> None:
    """In one process, since it imports torch: the Python page, and programs, of which the stores for torch run."""
    code = [
        as_program(
            "rendezvous.md",
            "import torch, torch.distributed\nrank, world_size = 0, 1\n",
            "total = torch.ones(1)\ntorch.distributed.all_reduce(total)\nassert total.item() == world_size\n"
            "torch.distributed.destroy_process_group()\n"
            "store.set('a', 'b')\nassert store.get('a') == b'b'\n",
            **{"/shared/dir/store-of-this-job": str(tmp_path / "store")},
        )
    ]
    for page in TAKES_MORE:
        trees = [parsed(text) for name, text in python_blocks() if name == page]
        assert trees, f"{page} has no Python any more"
        code += _imports_and_names(trees)
    # A module that stands for several of NVIDIA's is there once its package is.
    code.append("import importlib, hpc_elastic.inprocess")
    code += [
        f"getattr(importlib.import_module({module!r}), {name!r})"
        for module, _, name in (full.rpartition(".") for full in python_page.names())
        if not module.startswith("hpc_elastic.integrations.")  # each imports its framework: tests/frameworks
    ]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr


def _imports_and_names(trees: list[ast.Module]) -> list[str]:
    """What is imported, and each attribute of it that is used: `inprocess.Wrapper`."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imports = [ast.unparse(node) for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if isinstance(node, ast.Import) or alias.name[0].isupper()
    }
    attributes = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    looked_up = sorted(
        name for name in attributes if any(name.startswith(f"{module}.") for module in modules) and "(" not in name
    )
    return [*imports, *looked_up]
