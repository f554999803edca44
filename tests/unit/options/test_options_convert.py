"""``convert``: sbatch files of many styles, and the command that each becomes; what can't be taken over is said."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.options.convert import Conversion, LineStatus, convert
from hpc_elastic.options.run_request import ALL_OPTIONS, REFUSED, check_values
from hpc_elastic.options.table import parse

FILES = Path(__file__).resolve().parents[2] / "data" / "sbatch"
EXPECTED = dict(re.findall(r"^=== (\S+)\n(.*?)(?=^=== |\Z)", (FILES / "commands.txt").read_text(), re.M | re.S))
"""File → what is printed, and the lines that are left to the user."""


def check(argv: Sequence[str]) -> None:
    check_values(parse(argv, ALL_OPTIONS, refused=REFUSED))


def converted(text: str) -> Conversion:
    return convert(text, check)


@pytest.mark.parametrize("path", sorted(FILES.glob("*.sbatch")), ids=lambda path: path.stem)
def test_what_a_file_becomes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 only where nothing is open; the whole command always; each line once with its reason."""
    text = path.read_text(encoding="utf-8")
    found = converted(text)
    code = main(["convert", str(path)])
    out, err = capsys.readouterr()
    left = "".join(f"left: {line.number}: {line.why}\n" for line in found.manual)
    assert out + left == EXPECTED[path.name]
    assert code == (1 if found.manual else 0)
    assert ("left to you (above)" in err) == bool(found.manual)
    assert all(line.why for line in found.lines)
    noted = {number for line in found.lines for number in range(line.number, line.number + line.text.count("\n") + 1)}
    for number, line in enumerate(text.splitlines(), 1):
        assert number in noted or re.match(r"\s*(#(?!SBATCH|!)|done|do$|fi$|function |\}|wait|$)", line), line


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("srun torchrun --standalone --node-rank 0 --run-path --logs-specs mine --tee 3 x.py", "--tee 3 x.py"),
        ("if ! timeout 2h srun -n2 python x.py; then exit 1; fi", "--nproc-per-node 1 x.py"),
        ("srun -N2 --ntasks-per-node=4 python -X dev -m pkg.x $SLURM_PROCID",
         "--nproc-per-node 4 --no-python bash -c 'exec python -u -m pkg.x $SLURM_PROCID'"),
        ("srun uv run --frozen torchrun x.py",
         "--python \"$(uv run --frozen python -c 'import sys; print(sys.executable)')\" x.py"),
        ("conda run -n mine python -m pkg.x --id $SLURM_JOB_ID",
         "--nproc-per-node 1 --no-python bash -c 'exec \"$(conda run -n "
         "mine python -c '\"'\"'import sys; print(sys.executable)'\"'\"')\" -u -m pkg.x --id $SLURM_JOB_ID'"),
        ("srun nsys profile -o out torchrun x.py", "--worker-prefix 'nsys profile -o out' x.py"),
        ("srun env A=1 B='a b' torchrun --no-python ./x $A", "--setup 'export A=1; export B='\"'\"'a b'\"'\"'' "
         "--no-python bash -c 'exec ./x $A'"),
        ("accelerate launch --num_processes $((2*8)) --num_machines=2 --use_fsdp --mixed_precision no -m pkg.x",
         "--nproc-per-node 8 --setup 'export ACCELERATE_MIXED_PRECISION=no' --module pkg.x"),
        ("deepspeed --no_local_rank --num_gpus=8 --include n1:0 x.py", "--nproc-per-node 8 x.py"),
        ('srun sh -lc "cd /w; ulimit -c 0; torchrun x.py"',
         "--chdir /w --no-python bash -c 'ulimit -c 0; exec python -u x.py'"),
        ("X=a.py; srun torchrun $X --at $MASTER_ADDR", "--no-python bash -c 'exec python -u a.py --at $MASTER_ADDR'"),
        ("srun torchrun x.py --key '$TOKEN' \\$HOME \"\\$HOME\"", "x.py --key '$TOKEN' \\$HOME \"\\$HOME\""),
        ("[ -d out ] && srun torchrun x.py", "x.py"),
        ("srun --container-image i.sqsh --container-readonly --no-container-mount-home torchrun x.py",
         "--container-image pyxis:i.sqsh --container-args='--container-readonly --no-container-mount-home' x.py"),
        ("srun apptainer exec --nv -B /data:/data,/scratch --pwd /work --env A=1 -c t.sif torchrun --role r x.py",
         "--container-workdir /work --container-image apptainer:t.sif --container-mounts /data:/data,/scratch --role r "
         "--container-args='--env=A=1 -c' x.py"),
        ("srun podman run --rm -it --network host -v /data:/data:ro -e A=1 -w /work my/image python3 -m "
         "torch.distributed.run x.py", "--container-workdir /work --container-image podman:my/image "
         "--container-mounts /data:/data:ro --container-args='-e A=1' x.py"),
        ("srun ch-run -b /data:/mnt --write /images/t -- torchrun x.py",
         "--container-image charliecloud:/images/t --container-mounts /data:/mnt --container-args=--write x.py"),
        ("srun singularity run --nv t.sif torchrun --nnodes 2 x.py", "--container-image singularity:t.sif x.py"),
        ("srun apptainer run t.sif ./start", "--container-image apptainer:t.sif SCRIPT"),
        ("srun --multi-prog tasks.conf", "SCRIPT"),
        ("srun -N1 python a.py : -N1 python b.py", "--nproc-per-node 1 a.py"),
    ],
)  # fmt: skip
def test_what_a_start_becomes(line: str, command: str) -> None:
    found = converted(f"#SBATCH --nodes=2\n{line}\n")
    assert sorted(found.command.split()) == sorted(f"hpc-elastic submit --nodes 2 {command}".split())
    assert found.command.endswith(command.rpartition(" -")[2].rpartition("--setup")[2])


def test_what_the_job_alone_knows_is_never_expanded_by_the_shell_that_submits() -> None:
    """It is expanded by each worker, or the shell refuses the line until the user has set it."""
    found = converted(
        "NAME=run-$SLURM_JOB_ID\nSTAMP=$(date +%s)\nPORT=$(srun hostname)\nLRS=(1 2)\n"
        "srun torchrun x.py $NAME $STAMP ${LRS[$SLURM_ARRAY_TASK_ID]} $PORT $SITE ${2:-a}\n"
    )
    assert found.before == ("export STAMP=$(date +%s)",)
    assert found.words[2:] == (
        "--no-python", "bash", "-c", "'NAME=run-$SLURM_JOB_ID; LRS=(1 2); exec python -u x.py $NAME $STAMP "
        "${LRS[$SLURM_ARRAY_TASK_ID]} '\"${PORT?set it first}\"' $SITE '\"${ARGUMENT_2:-a}\"''",
    )  # fmt: skip
    assert [line.why[:6] for line in found.manual] == ["$2: it", "$PORT:"]
    found = converted("srun --container-image $SLURM_JOB_USER.sif torchrun x.py\n")
    assert found.words[2:4] == ("--container-image", "pyxis:${SLURM_JOB_USER?set it first}.sif")
    assert found.manual


def test_the_environment_is_made_on_the_nodes_and_once() -> None:
    found = converted(
        "ROOT=/opt\nmodule load cuda  # 12\nexport DATA=/data\nexport LIB=$ROOT/lib SEED=1 # 2\n"
        "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID\nsrun torchrun train.py $DATA\n"
    )
    assert found.before == ("export DATA=/data",)
    assert found.words[2:4] == ("--setup", "'module load cuda; ROOT=/opt; export LIB=$ROOT/lib SEED=1'")
    assert [line.number for line in found.manual] == [5]


def test_what_submit_would_refuse_is_left_to_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.sh"
    path.write_text("#SBATCH --nodes=2\n#SBATCH --time=soon\nsrun torchrun --nnodes 2 --max-restarts x train.py\n")
    assert main(["convert", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == "hpc-elastic submit --nodes 2 train.py\n"
    assert "--time soon: not a time" in err
    assert "--max-restarts x: " in err
    assert main(["convert", str(tmp_path / "absent")]) == 2
    assert "absent can't be read: No such file or directory" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert main(["convert", str(tmp_path / "binary")]) == 2
    assert "binary is not UTF-8 text" in capsys.readouterr().err


def test_directives_that_slurm_ignores_are_dropped() -> None:
    found = converted("#SBATCH -N2\n#SBATCH hetjob\n#SBATCH -N3\nsrun torchrun x.py\n#SBATCH --time=1\n")
    assert found.words[2:] == ("--nodes", "2", "x.py")
    assert [line.status for line in found.lines if line.number == 5] == [LineStatus.DROPPED]


def test_half_a_file_is_read_as_far_as_it_goes() -> None:
    for path in FILES.glob("*.sbatch"):
        text = path.read_text()
        for at in range(0, len(text), 199):
            for part in (text[:at], text[at:]):
                assert converted(part).words[:2] == ("hpc-elastic", "submit")
