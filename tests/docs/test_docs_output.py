"""Every block of output in the documentation is what the program prints: its commands are run, and compared.

``python -m pytest tests/docs/test_docs_output.py --update-docs`` writes the blocks anew where a text has changed; those
that a cluster prints are compared by tests/slurm, and written by the same option there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.rigs.shown_output import Block, Session, ShownOutput, blocks, has_output
from tests.rigs.waiting import until

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HERE = {"first-run", "events", "html", "config", "convert", "health-check", "notice", "hangs", "setup-failed"}
ON_SLURM = {"submit", "cluster", "bad-nodes"}
"""By tests/slurm."""
PATIENCE = 90.0

STEPS = """
import os, sys, time, hpc_elastic
for step in range(100000 if os.environ["HPC_ELASTIC_ATTEMPT"] == "0" else 0):
    if step == 10 and os.environ["RANK"] == "0":
        print("trains", flush=True)
    time.sleep(0.02)
    if hpc_elastic.should_checkpoint(step):
        sys.exit(0)
"""
UNFIT = """#!/bin/sh
[ "$HPC_ELASTIC_NODE" != 1 ] || { echo "GPU 2 is throttled by its temperature" >&2; exit 1; }
"""


class Home:
    """A user's project on a machine that has nothing else: below `root` as below ``/``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project = root / "home" / "me" / "project"
        self.project.mkdir(parents=True)
        (self.project / "docs").symlink_to(DOCS)

    def environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HPC_ELASTIC_", "SLURM_", "SBATCH_", "PET_"))
        }
        layers = {"SITE": self.root / "etc/xdg", "USER": self.root / "home/me/.config"}
        files = {name: folder / "hpc_elastic" / "config.toml" for name, folder in layers.items()}
        return {
            **kept,
            **{f"HPC_ELASTIC_{name}_CONFIG": str(file) if file.exists() else "" for name, file in files.items()},
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(self.root / "state"),
        }

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)

    def start(self, command: str) -> subprocess.Popen[str]:
        _, *arguments = shlex.split(command)
        return subprocess.Popen(
            [sys.executable, "-m", "hpc_elastic", *arguments],
            cwd=self.project, env=self.environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def session(self, command: str, *, code: int = 0) -> Session:
        """Run a command as a page has it."""
        process = self.start(command)
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
        assert process.returncode == code, output
        return Session(output=output, folder=self.root)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, Session]:
    """The tutorial's command, run as it stands there."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    tutorial = page("tutorial/first-run.md").replace("\\\n", "")
    (command,) = re.findall(r"^\$ (hpc-elastic run .*--kill-rank .*)$", tutorial, re.MULTILINE)
    for _ in range(3):
        home = Home(tmp_path_factory.mktemp("first-run"))
        session = home.session(command)
        if "SIGABRT" not in session.output:  # torch aborts a rank now and then at its exit: pytorch issue 38228
            break
    return home, session


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def fences(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)


@pytest.mark.torch
def test_the_first_run(first_run: tuple[Home, Session], shown_output: ShownOutput) -> None:
    shown_output.check("first-run", first_run[1])


@pytest.mark.torch
def test_its_events(first_run: tuple[Home, Session], shown_output: ShownOutput) -> None:
    shown_output.check("events", first_run[0].session("hpc-elastic logs --events"))


@pytest.mark.torch
def test_its_report_as_a_page(first_run: tuple[Home, Session], shown_output: ShownOutput) -> None:
    shown_output.check("html", first_run[0].session("hpc-elastic report --format html"))


def test_the_values_that_hold(home: Home, shown_output: ShownOutput) -> None:
    project, user, site = fences("how-to/configure.md", "toml")[:3]
    home.write(
        {
            "home/me/project/hpc_elastic.toml": project,
            "home/me/project/.venv/bin/python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
            "home/me/.config/hpc_elastic/config.toml": user.replace("$SCRATCH", str(home.root / "scratch")),
            "etc/xdg/hpc_elastic/config.toml": site,
        }
    )
    shown_output.check("config", home.session("hpc-elastic config --profile a100"))


def test_an_sbatch_file_that_is_converted(home: Home, shown_output: ShownOutput) -> None:
    (file,) = fences("how-to/from-my-sbatch.md", "bash")
    home.write({"home/me/project/train.sbatch": file})
    shown_output.check("convert", home.session("hpc-elastic convert train.sbatch"))


def test_a_node_that_is_not_fit(home: Home, shown_output: ShownOutput) -> None:
    home.write({"home/me/project/check-node.sh": UNFIT, "home/me/project/train.py": "print('trains')\n"})
    command = "hpc-elastic run --cluster local --nodes 1-2 --health-check ./check-node.sh train.py"
    shown_output.check("health-check", home.session(command))


def test_a_setup_that_fails(home: Home, shown_output: ShownOutput) -> None:
    home.write({"home/me/project/train.py": "print('trains')\n"})
    (command,) = re.findall(r"^\$ (hpc-elastic run .*)$", page("how-to/environment-and-hooks.md"), re.MULTILINE)
    shown_output.check("setup-failed", home.session(command, code=93))


def test_a_notice(home: Home, shown_output: ShownOutput) -> None:
    home.write({"home/me/project/train.py": STEPS})
    with (home.root / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hpc_elastic", "run", "--cluster", "local", "--nodes", "2", "--max-requeues", "3",
             "train.py"],
            cwd=home.project, env=home.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            until(
                lambda: process.poll() is not None or "trains" in (home.root / "log").read_text(),
                "workers that train",
                seconds=PATIENCE,
            )
            process.send_signal(signal.SIGUSR2)
            process.wait(PATIENCE)
        finally:
            process.kill()
    shown_output.check("notice", Session(output=(home.root / "log").read_text(), folder=home.root))


def test_dumps_of_the_flight_recorder(home: Home, shown_output: ShownOutput) -> None:
    """What torch 2.13 wrote on four ranks of which one had never come."""
    for rank in range(4):
        shutil.copy2(
            ROOT / f"tests/data/flight_recorder/gloo_2.13_never_{rank}", home.project / f"nccl_trace_rank_{rank}"
        )
    names = " ".join(f"nccl_trace_rank_{rank}" for rank in range(4))
    shown_output.check("hangs", home.session(f"hpc-elastic hangs {names}"))


def test_the_texts_by_which_troubleshooting_is_found_are_printed() -> None:
    """The heads of its items, where they quote a text of ours."""
    heads = re.findall(r"^- ((?:[^:`]|`[^`]*`)+): ", page("how-to/troubleshooting.md"), re.MULTILINE)
    quoted = [text for head in heads for text in re.findall(r"`([^`]+)`", head)]
    files = (*(ROOT / "hpc_elastic").rglob("*.py"), DOCS / "reference" / "cli.md")
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    joined = re.sub(r'"\s*\n\s*f?"', "", sources).replace("{armed}", "no")
    others = {"hpc-elastic: command not found", "launch failed requeued held", "cuda", "world size 1", "config"}
    assert len(quoted) > 8
    assert [text for text in quoted if text.removesuffix(" …") not in joined and text not in others] == []


# The mechanism itself -------------------------------------------------------------------------------------------------


def test_every_block_of_output_names_its_session() -> None:
    assert [block.where for block in blocks() if has_output(block) and not block.session] == []


def test_every_session_is_run_somewhere() -> None:
    assert {block.session for block in blocks() if block.session} == HERE | ON_SLURM
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "slurm").glob("test_*.py"))
    assert [name for name in ON_SLURM if f'shown_output.check("{name}"' not in text] == []


def example(shown: str, *, whole: bool = False) -> Block:
    return Block(page=ROOT / "README.md", session="x", whole=whole, language="text", text=shown, span=(0, 0))


PRINTED = Session(
    output="[node0] round 0: master 127.0.0.1:41813, 0 of 3 restarts used\n[node1] ready\n[node0] closed\n",
    folder=Path("/nowhere"),
)


@pytest.mark.parametrize(
    ("shown", "problems"),
    [
        ("[node0] round 0: master 127.0.0.1:5, 0 of 3 restarts used\n", 0),
        ("[node1] ready\n…\n[node0] round 0: master 127.0.0.1:5, 0 of 3 restarts used\n[node0] closed\n", 0),
        ("[node0] round 0: master 127.0.0.1:5, 1 of 3 restarts used\n", 1),
        ("[node0] closed\n[node0] round 0: master 127.0.0.1:5, 0 of 3 restarts used\n", 1),
        ("[node1] closed\n", 1),
    ],
)
def test_a_block_that_is_not_what_was_printed_is_seen(shown: str, problems: int) -> None:
    assert len(PRINTED.problems(example(shown))) == problems


ROUND_ZERO = "    round 0: 4 nodes, 4 workers, 13.8 s, cost 0.2 s: rank 2 on node2: Signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    "lines",
    [
        (
            "  verdict   : first of 4; the others were stopped within 12 ms",
            "  verdict   : the only failure that is not a consequence of another one; 1 other is a consequence",
            "  verdict   : the only failure that is not a consequence of another one; 2 others are consequences",
        ),
        (
            "[node0] round opened (round 1): rank 2 ended with SIGKILL on node2",
            "[node0] round opened (round 1): rank 2: Signal 9 (SIGKILL) received by PID 77 on node2",
        ),
        (
            f"{ROUND_ZERO} received by PID 26533",
            f"{ROUND_ZERO} received by PID 26533 (+1 more)",
            f"{ROUND_ZERO} received by PID 26533 (+2 more)",
        ),
    ],
)
def test_of_two_true_lines_any_may_be_shown(lines: tuple[str, ...]) -> None:
    assert len({PRINTED.key(line) for line in lines}) == 1


def test_a_block_that_leaves_lines_out_is_not_whole() -> None:
    assert PRINTED.problems(example("[node1] ready\n", whole=True))
    assert not PRINTED.problems(example(PRINTED.output, whole=True))


def test_a_text_that_has_changed_is_written_anew() -> None:
    shown = "[node0] round 0: main 127.0.0.1:5, none of 3 restarts used\n…\n[node0] is closed\n"
    found = PRINTED.updated(example(shown))
    assert found == "[node0] round 0: master 127.0.0.1:41813, 0 of 3 restarts used\n…\n[node0] closed\n"
    with pytest.raises(AssertionError, match="nothing like"):
        PRINTED.updated(example("[node1] an entirely different thing, of which nothing was printed\n"))
