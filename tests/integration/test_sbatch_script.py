"""Generated scripts, and the user's lines in them, before bash, shellcheck and the installed sbatch's option parser."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.launch.submit_job import literal_path, render_script
from hpc_elastic.options.sbatch import SbatchOptions, ScriptLines

NASTY = (
    "plain",
    "two  words",
    "it's",
    'a "quoted" one',
    "$HOME ${HOME} $(id) `id`",
    "back\\slash \\\" \\' \\n",
    "# no comment",
    "a;b|c&d>e<f (g) {h} [i] *?!",
    "~/x ~root",
    "é ü 日本 🚀 ‘quotes’ “double” \u00a0nbsp",
    "100%j %% %A",
    "-dash --double",
    "@RUN_DIR@ @COMMAND@",
    "trailing \\",
    "'",
    '"',
    "''\"\"",
    "a=b,c:d",
)
DIRECTORY_OF_ALL = "/runs/" + " ".join(NASTY).replace("/", "_")


def script_of(options: SbatchOptions, run_dir: str, *command: str) -> str:
    return render_script(options, run_dir=run_dir, command=["/bin/sh", *command])


def outcome(text: str, folder: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The script's end in a shell."""
    script = folder / "job.sbatch"
    script.write_text(text, encoding="utf-8", errors="surrogateescape")
    return subprocess.run(["bash", str(script)], capture_output=True, text=True, env=env)


def shown(expression: str, folder: Path, env: Mapping[str, str] | None = None) -> str:
    """What a supervisor that prints this Python expression sees."""
    command = [sys.executable, "-c", f"import os, signal; print({expression})"]
    done = outcome(render_script(SbatchOptions(), run_dir=str(folder), command=command), folder, env)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.fixture(scope="module")
def shellcheck() -> str:
    found = shutil.which("shellcheck")
    if found is None:
        pytest.skip("shellcheck is not installed")
    return found


@pytest.mark.parametrize("value", [*NASTY, DIRECTORY_OF_ALL], ids=range(len(NASTY) + 1))
def test_bash_and_shellcheck_find_nothing(value: str, shellcheck: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(
        script_of(SbatchOptions(nodes="2-4", comment=value, job_name=value), f"/runs/{value}", "-c", value, value)
    )
    for argv in (["bash", "-n", str(path)], [shellcheck, str(path)]):
        done = subprocess.run(argv, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), argv[0]


@pytest.mark.parametrize(
    "value", [*NASTY, "two\nlines", "\udcff\udcfe".encode("utf-8", "surrogateescape").decode("latin-1")]
)
def test_the_supervisor_gets_its_arguments_as_they_are(value: str, tmp_path: Path) -> None:
    run_dir = tmp_path / value.replace("/", "_")
    run_dir.mkdir()
    show = "import sys; print(ascii(sys.argv[1:]))"
    text = render_script(
        SbatchOptions(output="x"), run_dir=str(run_dir), command=[sys.executable, "-c", show, value, str(run_dir)]
    )
    done = outcome(text, tmp_path)
    assert done.stderr == ""
    assert done.stdout.strip() == ascii([value, str(run_dir)])


@pytest.mark.parametrize("submitter", [{"HPC_ELASTIC_TAG": "a:host:b"}, {"HPC_ELASTIC_NODE_TAG": "a:host"}, {}])
def test_a_job_that_a_worker_submitted_by_hand_is_none_of_its_run(submitter: dict[str, str], tmp_path: Path) -> None:
    show = "sorted(name for name in os.environ if name.startswith(('HPC', 'TORCHEL', 'RANK')))"
    env = {**submitter, "HPC_ELASTIC_NODES": "2", "RANK": "7", "TORCHELASTIC_RUN_ID": "x", "PATH": os.environ["PATH"]}
    kept = [] if submitter else ["RANK", "TORCHELASTIC_RUN_ID"]
    assert shown(show, tmp_path, env) == str(["HPC_ELASTIC_NODES", *kept])


def test_what_the_node_does_not_see_is_said(tmp_path: Path) -> None:
    env = {**os.environ, "SLURMD_NODENAME": "n7"}
    done = outcome(script_of(SbatchOptions(), str(tmp_path / "not %s here"), "-c", "echo started"), tmp_path, env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hpc-elastic: the run directory {tmp_path}/not %s here is not on node n7: ")
    done = outcome(render_script(SbatchOptions(), run_dir=str(tmp_path), command=["/no/python3"]), tmp_path, env)
    assert done.returncode == 2
    assert "the interpreter /no/python3 is not on node n7" in done.stderr


def test_a_notice_during_the_set_up_does_not_end_the_job(tmp_path: Path) -> None:
    """The trap is inherited through exec: the supervisor begins with USR2 ignored."""
    assert shown("signal.getsignal(signal.SIGUSR2)", tmp_path) in ("Handlers.SIG_IGN", "1")


def test_the_shape_of_the_job_is_not_handed_on(tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "9", "SLURM_CPUS_PER_TASK": "2", "SLURM_TRES_PER_TASK": "cpu=2"}
    show = "sorted(k for k in os.environ if k.startswith('SLURM'))"
    assert shown(show, tmp_path, {**os.environ, **env}) == "['SLURM_JOB_ID']"


@pytest.fixture(scope="module")
def sbatch_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """sbatch reads a script's options, and says so, before it asks the controller, which is not there."""
    if shutil.which("sbatch") is None:
        pytest.skip("sbatch is not installed")
    conf = tmp_path_factory.mktemp("conf") / "slurm.conf"
    conf.write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=1\n"
        "NodeName=n1\nPartitionName=main Nodes=n1\n"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
    return {**clean, "SLURM_CONF": str(conf)}


@pytest.mark.parametrize("value", NASTY)
def test_sbatch_reads_every_value_as_it_was_given(
    value: str, sbatch_environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "job.sbatch"
    options = SbatchOptions(nodes="2:4", time="10", comment=value, job_name=value, extra=(f"--wckey={value}",))
    script.write_text(script_of(options, f"/runs/{value}"), encoding="utf-8")
    done = subprocess.run(
        ["sbatch", "-vvv", str(script)], capture_output=True, env=sbatch_environment, cwd=tmp_path, timeout=60
    )
    said = done.stderr.decode()
    for argument in (f"--comment={value}", f"--job-name={value}", f"--wckey={value}", "--nodes=2-4", "--no-kill"):
        assert f'Found in script, argument "{argument}"\n' in said
    assert f'Found in script, argument "--output={literal_path(f"/runs/{value}")}/job.log"\n' in said
    assert "Unable to contact slurm controller" in said


def script(tmp_path: Path, lines: ScriptLines | None, *command: str, template: str | None = None) -> str:
    options = SbatchOptions(nodes="1")
    return render_script(options, run_dir=str(tmp_path), command=command, template=template, lines=lines)


def test_without_any_the_script_is_as_it_was(tmp_path: Path) -> None:
    assert script(tmp_path, ScriptLines(), "/bin/true") == script(tmp_path, None, "/bin/true")


def test_they_stand_around_the_run_and_its_code_is_the_scripts(tmp_path: Path) -> None:
    lines = ScriptLines(setup=("export WORD=@HERE@", "echo before"), teardown=("echo after",))
    text = script(tmp_path, lines, "/bin/bash", "-c", 'echo "run $WORD"; exit 75')
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("before\nrun @HERE@\nafter\n", 75), done.stderr


def test_a_set_up_that_fails_is_the_users_matter(tmp_path: Path) -> None:
    text = script(tmp_path, ScriptLines(setup=("false || exit 3",)), "/bin/true")
    assert subprocess.run(["bash", "-c", text], check=False).returncode == 3


SUPERVISOR = """
import os, signal, sys, time
came = [] if signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN else ["an interpreter that starts would have died"]
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda number, frame: came.append(signal.Signals(number).name))
os.kill(os.getppid(), signal.SIGUSR2)
while not came: time.sleep(0.01)
os.kill(os.getppid(), signal.SIGTERM)
while len(came) < 2: time.sleep(0.01)
print(*came, flush=True)
sys.exit(75)
"""


def test_slurms_signals_reach_the_run_where_the_shell_stays(tmp_path: Path) -> None:
    text = script(tmp_path, ScriptLines(teardown=("echo after",)), sys.executable, "-c", SUPERVISOR)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == ("SIGUSR2 SIGTERM\nafter\n", 75), done.stderr


def test_another_template_has_no_place_for_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no place in this template"):
        script(tmp_path, ScriptLines(setup=("true",)), "/bin/true", template="#!/bin/bash\necho @COMMAND@\n")
