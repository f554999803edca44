"""``hpc-elastic submit`` with a stand-in for sbatch on PATH: what is made, printed, and left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.run.spec import load_run_spec
from tests.rigs.captures import captured
from tests.rigs.small_disk import small_disk

PYTHON = str(Path(sys.executable))
AS_ROOT = os.geteuid() == 0


class Site:
    """A login node: a working directory with train.py, and a folder of commands that is all of PATH."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.work = root / "work"
        self.bin = root / "bin"
        self.state = root / "state"
        self.asked = root / "asked"
        for folder in (self.work, self.bin):
            folder.mkdir()
        (self.work / "train.py").write_text("print('hello')\n")
        (self.work / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun torchrun train.py\n")

    def command(self, name: str, *, rc: int = 0, out: str = "", err: str = "", and_then: str = "") -> None:
        """Let a command print what a real one printed. It notes how it was called, and what its environment was."""
        (self.bin / f"{name}.out").write_text(out)
        (self.bin / f"{name}.err").write_text(err)
        path = self.bin / name
        path.write_text(
            f'#!/bin/sh\nexport > "{self.asked}.{name}.env"\n'
            f'for word; do printf "%s\\n" "$word"; done > "{self.asked}.{name}"\n'
            f'while read -r line; do printf "%s\\n" "$line"; done < "{self.bin}/{name}.out"\n'
            f'while read -r line; do printf "%s\\n" "$line"; done < "{self.bin}/{name}.err" >&2\n'
            f"{and_then}\nexit {rc}\n"
        )
        path.chmod(0o755)

    def captured(self, command: str, name: str, version: str = "22.05.8") -> None:
        rc, out, err = captured(version, name)
        self.command(command, rc=rc, out=out, err=err)

    def asked_of(self, name: str) -> list[str]:
        return Path(f"{self.asked}.{name}").read_text().splitlines()

    def submit(self, *argv: str) -> tuple[int, str, str]:
        code = main(["submit", "--allow-local-runs-dir", *argv])  # pytest's folders are in /tmp
        out, err = self._capsys.readouterr()
        return code, out, err

    def everything(self) -> set[str]:
        return {str(path.relative_to(self.work)) for path in self.work.rglob("*")}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Site:
    site = Site(tmp_path, capsys)
    site.command("sbatch", out="1234\n")
    site.captured("sinfo", "sinfo-N-o-drained")
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH", "PET_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(site.bin))
    monkeypatch.setenv("XDG_STATE_HOME", str(site.state))
    monkeypatch.setenv("PWD", str(site.work))
    monkeypatch.chdir(site.work)
    return site


def the_run(site: Site) -> Path:
    (run,) = (site.work / "runs").iterdir()
    return run


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_submitted_run(site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    umask = os.umask(0)
    try:
        code, out, err = site.submit("--nodes", "2:4", "train.py", "a b", "it's", "$HOME", "new\nline", "é", "--", "-h")
    finally:
        os.umask(umask)
    assert (code, err) == (0, "")
    run = the_run(site)
    spec = load_run_spec(run / "run.json")
    assert spec.entrypoint.args == ("a b", "it's", "$HOME", "new\nline", "é", "--", "-h")
    assert (spec.min_nodes, spec.max_nodes, spec.cwd, spec.cluster) == (2, 4, str(site.work), "slurm")
    assert "--nodes=2-4" in spec.sbatch_args
    assert site.asked_of("sbatch") == ["--parsable", str(run / "job.sbatch")]
    for line in (
        "job             1234",
        f"run directory   {run}",
        f"job log         {run}/job.log",
        "hpc-elastic report 1234",
    ):
        assert line in out
    assert mode(site.work / "runs") == mode(run) == 0o700
    assert {mode(path) for path in run.iterdir()} == {0o600}
    assert {path.name for path in run.iterdir()} == {"run.json", "secret", "job.sbatch", "job.log"}
    assert len(bytes.fromhex((run / "secret").read_text().strip())) == 32
    assert f"#SBATCH --output={run}/job.log" in (run / "job.sbatch").read_text()
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir("/")
        assert main(["report", "1234", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_dir"] == str(run)
    site.submit("train.py")
    assert len({(path / "secret").read_text() for path in (site.work / "runs").iterdir()}) == 2, "two runs are two"


def test_job_and_workers_begin_in_the_folder_that_is_asked_for(site: Site) -> None:
    (site.work / "sub folder").mkdir()
    (site.work / "sub folder" / "train.py").touch()
    code, _, err = site.submit("--chdir", "sub folder", "--runs-dir", str(site.work / "runs"), "train.py")
    assert (code, err) == (0, "")
    run = the_run(site)
    assert load_run_spec(run / "run.json").cwd == str(site.work / "sub folder")
    assert f'#SBATCH --chdir="{site.work}/sub folder"\n' in (run / "job.sbatch").read_text()


def test_a_dry_run_prints_the_script_and_changes_nothing(site: Site) -> None:
    before = site.everything()
    code, out, err = site.submit("--dry-run", "--nodes=3", "--comment=a 'b' $c", "train.py")
    assert code == 0
    plan = [line[:16].strip() for line in err.splitlines() if line]
    assert plan == ["nodes", "runs", "where", "on failure", "run directory"]
    assert out.startswith("#!/bin/bash\n#SBATCH --nodes=3\n")
    assert "#SBATCH --comment=\"a 'b' $c\"\n" in out
    assert out.splitlines()[-1].startswith("# sbatch --parsable /")
    assert site.everything() == before
    assert not Path(f"{site.asked}.sbatch").exists()
    assert not site.state.exists()
    done = subprocess.run(["/bin/bash", "-n"], input=out, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["/usr/bin/python3.11", "train.py"], "leave /usr/bin/python3.11 out: hpc-elastic starts"),
        (["--dry-run", "job.sbatch"], "is run by Python; hpc-elastic convert job.sbatch prints the command"),
        (["-t", "0:3", "train.py"], "torchrun's -t is --tee 0:3"),
        (["--job-name=two\nlines", "train.py"], "--job-name 'two\\nlines': a line break"),
        (["--nodes=5", "train.py"], "partition main has 4 nodes; the job would never start"),
        (["--nodes=5-9", "-p", "short", "train.py"], "partition short has 4 nodes"),
        (["--nodes=4", "--exclude=n1", "train.py"], "partition main has 4 nodes, 1 of them excluded"),
    ],
)
def test_wrong_usage_is_one_line_and_leaves_nothing(site: Site, argv: list[str], says: str) -> None:
    before = site.everything()
    code, out, err = site.submit(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("hpc-elastic: error: ")
    assert says in err
    assert err.count("\n") == 1
    assert site.everything() == before
    assert not Path(f"{site.asked}.sbatch").exists()


@pytest.mark.parametrize("version", ["20.11.4", "24.11.5"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("err-sbatch-bad-partition", "invalid partition specified: nosuch"),
        ("err-sbatch-bad-constraint", "Invalid feature specification"),
        ("err-sbatch-too-much-gres", "Requested node configuration is not available"),
        ("err-sbatch-bad-option", "unrecognized option '--nosuch'"),
        ("err-sbatch-no-controller", "Unable to contact slurm controller"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(site: Site, version: str, name: str, says: str) -> None:
    site.captured("sbatch", name, version)
    before = site.everything()
    code, out, err = site.submit("train.py")
    assert (code, out) == (1, "")
    assert err.startswith("hpc-elastic: error: sbatch: ")
    assert says in err
    assert err.count("\n") == 1
    assert site.everything() == before
    assert not site.state.exists()


def test_an_answer_that_is_no_job_id_leaves_nothing(site: Site) -> None:
    site.command("sbatch", out="Welcome to the cluster\n")
    before = site.everything()
    code, _, err = site.submit("train.py")
    assert code == 1
    assert "printed 'Welcome to the cluster' instead of a job id" in err
    assert site.everything() == before


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"


@pytest.mark.parametrize(
    ("rc", "out", "err", "job"),
    [
        (0, "12 nodes are idle\nSubmitted batch job 77 on cluster b\nThank you.\n", "", "77 on cluster b"),
        (0, "77;b\nyour quota: 12 %\n", "", "77 on cluster b"),
        (1, "Submitted batch job 77\n", "wrapper: accounting failed\n", "77"),
        (0, "", "", "78"),
        (1, "", TIMED_OUT, "78"),
        (1, "", "", "78"),
    ],
)
def test_a_bad_answer_for_a_job_that_is_queued(site: Site, rc: int, out: str, err: str, job: str) -> None:
    """The job is in sbatch's output, or is found by its comment; its run directory stays."""
    site.command("sbatch", rc=rc, out=out, err=err)
    site.command("squeue", out=f"76|hpc-elastic {site.work}/runs/min|x\n78|hpc-elastic {site.work}/runs/mine|y\n")
    code, out, err = site.submit("--run-id=mine", "train.py")
    assert code == 0, err
    assert f"job             {job}\n" in out
    assert (site.work / "runs/mine/job.sbatch").exists()


def test_the_job_logs_folder_is_made(site: Site) -> None:
    names = ("--job-name=sweep/a", "--output=logs/%x-%j.out", "--error=err%%/%j.err")
    assert site.submit("--dry-run", *names, "train.py")[0] == 0
    assert not (site.work / "logs").exists()
    assert site.submit(*names, "train.py")[0] == 0
    assert (site.work / "logs/sweep").is_dir()
    assert (site.work / "err%").is_dir()


def test_no_sbatch(site: Site) -> None:
    (site.bin / "sbatch").unlink()
    code, out, err = site.submit("--cluster=slurm", "train.py")
    assert (code, out) == (2, "")
    assert err == (
        "hpc-elastic: error: sbatch is not on PATH: no Slurm here, or a container without it; "
        "run on this machine with --cluster local\n"
    )
    assert not (site.work / "runs").exists()


def test_a_broken_sinfo_stops_nothing(site: Site) -> None:
    site.captured("sinfo", "err-sinfo-no-controller")
    assert site.submit("--nodes=100", "train.py")[0] == 0


def test_nodes_that_are_down_are_mentioned(site: Site) -> None:
    code, _, err = site.submit("--nodes=4", "train.py")
    assert code == 0
    assert err == "hpc-elastic: only 3 of the 4 nodes of partition main are up now\n"


@pytest.mark.parametrize(
    ("target", "says"),
    [("", "is there already"), ("elsewhere", "is a symbolic link"), ("absent", "is a symbolic link")],
)
def test_a_run_directory_that_exists_or_is_a_link(site: Site, target: str, says: str) -> None:
    (site.work / "elsewhere").mkdir()
    (site.work / "runs").mkdir(mode=0o700)
    mine = site.work / "runs" / "mine"
    mine.symlink_to(site.work / target) if target else mine.mkdir()
    code, out, err = site.submit("--run-id=mine", "train.py")
    assert (code, out) == (2, "")
    assert f"runs/mine {says}; choose another --run-id" in err
    assert list((site.work / "elsewhere").iterdir()) == []
    assert target or list(mine.iterdir()) == []


NEEDS_ROOT = pytest.mark.skipif(not AS_ROOT, reason="only root can give a folder away")


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("file", "file is not a folder"),
        ("file/below", ""),
        ("dangling", "is a symbolic link to nothing"),
        ("open", "can be written by every user; run: chmod o-w {work}/open"),
        pytest.param("theirs", "belongs to uid 65534, who could replace what is in it", marks=NEEDS_ROOT),
        # The sticky bit holds back all but the folder's owner.
        pytest.param("theirs-sticky", "give a folder of your own with --runs-dir", marks=NEEDS_ROOT),
        pytest.param("planted", "is a symbolic link of uid 65534", marks=NEEDS_ROOT),
    ],
)
def test_a_runs_folder_that_is_none_or_that_others_can_change_is_refused(site: Site, folder: str, says: str) -> None:
    (site.work / "file").write_text("")
    (site.work / "dangling").symlink_to("absent")
    for name, bits in (("open", 0o777), ("mine", 0o700), ("theirs", 0o777), ("theirs-sticky", 0o1777)):
        (site.work / name).mkdir()
        (site.work / name).chmod(bits)
    (site.work / "planted").symlink_to("mine")
    for name in ("theirs", "theirs-sticky", "planted"):
        if AS_ROOT:
            os.chown(site.work / name, 65534, 65534, follow_symlinks=False)
    before = site.everything()
    code, out, err = site.submit(f"--runs-dir={folder}", "train.py")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says.format(work=site.work) in err
    assert site.everything() == before


def test_a_runs_folder_that_is_ones_own_link_or_sticky_is_fine(site: Site) -> None:
    (site.work / "scratch").mkdir()
    (site.work / "scratch").chmod(0o1777)
    (site.work / "runs").symlink_to(site.work / "scratch")
    assert site.submit("train.py")[0] == 0
    assert len(list((site.work / "scratch").iterdir())) == 1


NOBODY = (
    "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); sys.path.insert(0, sys.argv[1]); "
    "from hpc_elastic.cli.main import main; sys.exit(main(sys.argv[2:]))"
)


@pytest.mark.skipif(not AS_ROOT, reason="only root can become another user")
def test_a_folder_that_may_not_be_written(site: Site) -> None:
    """As another user: root may write everywhere."""
    package = site.work.parent / "package"
    source = Path(__file__).parents[2]
    for name in ("hpc_elastic", "sbatch_templates"):
        shutil.copytree(source / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    for module in (click, msgspec):
        shutil.copytree(Path(module.__file__).parent, package / module.__name__)
    interpreter = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if interpreter is None:
        pytest.skip("no interpreter that another user can start")
    for folder in (site.work, *site.work.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    argv = ["submit", "--allow-local-runs-dir", "--runs-dir", str(site.work / "runs"), "train.py"]
    done = subprocess.run(
        [interpreter, "-c", NOBODY, str(package), *argv], cwd=site.work, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    why = f"can't make {site.work}/runs: "
    assert done.stderr.startswith(f"hpc-elastic: error: {why}")
    assert "you may not write there" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def tiny_disk(site: Site) -> Iterator[Path]:
    """A filesystem with room for two blocks, both taken."""
    folder = site.work / "tiny"
    folder.mkdir()
    with small_disk(folder, "8k"):
        (folder / "ballast").write_bytes(b"x" * 8192)
        yield folder


def test_a_full_disk(site: Site, tiny_disk: Path) -> None:
    code, out, err = site.submit("--runs-dir=tiny", "train.py")
    assert (code, out) == (2, "")
    assert "the disk is full, or your quota is used up" in err
    assert err.count("\n") == 1
    assert [path.name for path in tiny_disk.iterdir()] == ["ballast"]


def test_folders_that_no_other_node_sees(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["submit", "--runs-dir=/tmp/runs-of-a-test", "train.py"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert (
        "the nodes can't see /tmp/runs-of-a-test: /tmp is local to each node; give a shared folder with --runs-dir"
        in err
    )
    assert not Path("/tmp/runs-of-a-test").exists()


def test_given_options_win_over_sbatchs_variables_and_the_others_stay(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_OPEN_MODE", "SLURM_JOB_ID", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "9")
    monkeypatch.setenv("SBATCH_PARTITION", "high")
    assert site.submit("-p", "main", "train.py")[0] == 0
    seen = Path(f"{site.asked}.sbatch.env").read_text()
    assert "SBATCH_ACCOUNT=" in seen
    for name in ("SBATCH_PARTITION", "SBATCH_OPEN_MODE", "SLURM_JOB_ID", "SLURM_NTASKS"):
        assert name not in seen


def test_a_ctrl_c_during_sbatch_takes_effect_when_the_job_is_known(site: Site) -> None:
    site.command("sbatch", out="1234\n", and_then=f"kill -INT {os.getpid()}")
    assert site.submit("train.py")[0] == 130
    run = the_run(site)
    assert (run / "run.json").exists()
    assert len(list((site.state / "hpc_elastic" / "jobs").iterdir())) == 1


def test_wait_takes_over_the_code(site: Site) -> None:
    text = captured("22.05.8", "scontrol-show-job-cancelled-pending")[1]
    site.command("scontrol", out=text)
    code, out, err = site.submit("--wait", "train.py")
    assert code == 143
    assert "job 1234 is cancelled" in err
    assert "run directory" in out


@pytest.mark.parametrize("option", ["--wait", "--follow"])
def test_a_sigint_without_a_terminal_ends_the_waiting_alone(site: Site, option: str) -> None:
    site.captured("scontrol", "scontrol-show-job-running")
    argv = [PYTHON, "-m", "hpc_elastic", "submit", "--allow-local-runs-dir", option, "train.py"]
    with subprocess.Popen(
        argv,
        cwd=site.work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "is running on" in line:
                break
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.startswith("hpc-elastic: job 1234 continues; to end it: scancel 1234; ")
    assert "to follow it again: hpc-elastic logs 1234 --follow" in said
    assert not Path(f"{site.asked}.scancel").exists()


SUBCOMMANDS = (
    *("submit train.py", "submit --cluster local train.py", "run train.py", "agent train.py", "batch run", "report 5"),
    *("logs 5", "status 5", "list", "cancel 5", "requeue 5", "config"),
)


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_in_a_deleted_directory_it_says_so(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("PWD", str(gone))
    gone.rmdir()
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert said == (
        f"hpc-elastic: error: the current directory {gone} no longer exists (No such file or directory); "
        "change to another directory\n"
    )


def test_without_sbatch_it_runs_here_and_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the supervisor takes over signals and logging."""
    (site.bin / "sbatch").unlink()
    (site.work / "train.py").write_text("import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:])\n")
    argv = ["submit", "--nodes=2", "--gpus-per-node=2", "--nproc-per-node=1", "train.py", "a b", "--", "$x"]
    done = subprocess.run([PYTHON, "-m", "hpc_elastic", *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no sbatch here: running on this machine (--cluster local)" in done.stderr
    assert "no effect without Slurm: --gpus-per-node" in done.stderr
    for rank in (0, 1):
        assert f"rank {rank} ['a b', '--', '$x']" in done.stdout
    run = the_run(site)
    assert load_run_spec(run / "run.json").cluster == "local"
    assert mode(run) == 0o700


def test_run_in_an_allocation_refuses_to_be_multiplied_by_srun(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(__file__).parents[1] / "data" / "slurm" / "22.05.8" / "env-plain-step-n1-task0.txt"
    for line in path.read_text().splitlines():
        name, _, value = line.partition("=")
        monkeypatch.setenv(name, value)
    code = main(["run", "train.py"])
    assert code == 2
    assert "run was started by srun on 4 tasks; start it once, without srun" in capsys.readouterr().err
    assert not (site.work / "runs").exists()


def test_run_with_slurm_but_outside_a_job(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--cluster=slurm", "train.py"]) == 2
    assert "not in a Slurm allocation" in capsys.readouterr().err
