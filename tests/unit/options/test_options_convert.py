"""``convert``: sbatch files of many styles, and the command that each becomes; what can't be taken over is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.errors import UsageError
from hpc_elastic.options.convert import Conversion, Fate, convert

FILES = Path(__file__).resolve().parents[2] / "data" / "sbatch"


def converted(name: str) -> Conversion:
    (path,) = FILES.glob(f"{name}-*.sbatch")
    return convert(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "before", "command"),
    [
        ("01", [], "--job-name resnet --nodes 4 --gpus-per-node 4 --cpus-per-task 32 --time 12:00:00 "
         "--nproc-per-node 4 train.py --batch 64"),
        ("02", [], "--job-name multinode-example --nodes 2 --cpus-per-task 4 --gpus-per-node 1 "
         "--setup 'export LOGLEVEL=INFO' --nproc-per-node 1 multinode.py 50 10"),
        ("03", [], "--account proj42 --partition booster --nodes 8 --gres gpu:4 "
         "--time 02:00:00 --nproc-per-node 4 --setup 'module load Python/3.11 CUDA/12' "
         "--srun-arg=--cpu-bind=v,cores train.py --config configs/base.yaml"),
        ("04", [], "--nodes 2 --sbatch-arg=--mem-per-gpu=60G --sbatch-arg=--cpus-per-gpu=8 "
         "--sbatch-arg=--licenses=imagenet:1 --nproc-per-node 4 --gpus-per-node 4 "
         "--setup 'conda activate torch' --module pkg.train --epochs 90"),
        ("05", ["cd $HOME/project"], "--nodes 2-4 --gpus-per-node a100:8 "
         "--exclusive --sbatch-arg=--hint=nomultithread --no-requeue "
         "--setup 'source /opt/envs/torch/bin/activate' --nproc-per-node gpu --max-restarts 5 "
         "--rdzv-conf timeout=900 --module pkg.main"),
        ("06", [], "--nodes 2 --gpus-per-node 4 --setup 'export HF_HOME=$HOME/hf' run_clm.py --model gpt2"),
        ("07", [], "--nodes 1 --gpus-per-node 8 --export ALL,NCCL_DEBUG=INFO,OMP_NUM_THREADS=8 --mail-type END,FAIL "
         "--mail-user ann@example.org --nproc-per-node 8 train.py"),
        ("08", [], "--nodes 2 --grace 180 --output logs/%x-%j.out --error logs/%x-%j.err train.py --resume"),
        ("10", ["LR=${LR:-0.1}", 'DATA="/data/image net"', "ARGS=\"--lr $LR --data '$DATA'\""],
         "--nodes 2 --nproc-per-node 4 --tee 3 train.py $ARGS --note \"it's $USER\""),
        ("22", [], "--nodes 2 --partition batch --container-image pyxis:nvcr.io/nvidia/pytorch:24.05-py3 "
         "--container-mounts /data:/data --nproc-per-node 8 train.py"),
        ("17", [], "--nodes 2 --container-image singularity:image.sif train.py"),
        ("14", [], "--nodes 2 --nproc-per-node 2 --srun-arg=--mpi=pmi2 --python /opt/py/bin/python3.11 train.py"),
    ],
)  # fmt: skip
def test_what_is_taken_over_whole(name: str, before: list[str], command: str) -> None:
    found = converted(name)
    assert list(found.before) == before
    assert found.command == f"hpc-elastic submit {command}"
    assert found.left == ()


def test_what_means_nothing_here_is_left_out_of_the_line() -> None:
    found = convert("srun torchrun --standalone --node-rank 0 --run-path --logs-specs mine --tee 3 train.py\n")
    assert found.command == "hpc-elastic submit --tee 3 train.py"
    (line,) = found.lines
    assert line.why.startswith(
        "--run-path: not needed, a script always runs as __main__; --logs-specs: not needed, each"
    )
    assert "--standalone, --node-rank: not needed, nodes meet through files" in line.why


def test_what_the_command_itself_needs_stays_in_the_shell_that_submits() -> None:
    found = convert(
        "module load cuda  # 12\nsource env.sh\nexport DATA=/data\nexport SEED=1 # 2\n"
        "srun torchrun train.py $DATA $FROM_ENV\n"
    )
    assert found.before == ("source env.sh", "export DATA=/data")
    assert found.command == (
        "hpc-elastic submit --setup 'module load cuda; source env.sh; export SEED=1' train.py $DATA $FROM_ENV"
    )


@pytest.mark.parametrize(
    ("name", "left", "command"),
    [
        ("09", ["${LRS[$SLURM_ARRAY_TASK_ID]}"], "--array 0-7%2 --nodes 1 --gpus 4 --nproc-per-node 4 sweep.py --lr "
         "${LRS[$SLURM_ARRAY_TASK_ID]}"),
        ("11", ["mkdir -p $TMPDIR/data", "tar -xf /archive/data.tar -C $TMPDIR/data",
                "cp -r results /archive/results-$SLURM_JOB_ID"],
         "--nodes 1 --nproc-per-node 4 train.py --data $TMPDIR/data"),
        ("12", ["if [ -f last.pt ]; then", 'RESUME="--resume last.pt"', "fi"],
         "--nodes 2 --nproc-per-node 2 train.py $RESUME"),
        ("13", ["runs/$SLURM_JOB_ID"], "--nodes 2 --nproc-per-node 2 train.py --out runs/$SLURM_JOB_ID --seed 1"),
    ],
)  # fmt: skip
def test_what_the_user_has_to_decide(
    name: str, left: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = converted(name)
    assert [line.text for line in found.left] == left
    assert found.command == f"hpc-elastic submit {command}"
    (path,) = FILES.glob(f"{name}-*.sbatch")
    assert main(["convert", str(path)]) == 1
    out, err = capsys.readouterr()
    assert " ".join(out.replace("\\\n", " ").split()).endswith(" ".join(command.split()[-3:]))
    assert f"{len(left)} line{'s' if len(left) > 1 else ''} not taken over (above)" in err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("15", "line 3: the workers are started by more than a simple command"),
        ("16", "line 4: a second line that starts workers"),
        ("18", "no line starts workers"),
        ("19", "what deepspeed starts is not seen from here"),
        ("20", "no line starts workers"),
        ("21", "how many tasks each node has is not said; add --ntasks-per-node"),
    ],
)
def test_what_is_not_guessed(name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=says):
        converted(name)
    (path,) = FILES.glob(f"{name}-*.sbatch")
    assert main(["convert", str(path)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (
            "apptainer exec --nv -B /data:/data,/scratch --pwd /work --env A=1 -c t.sif torchrun --role r x.py",
            "--container-workdir /work --container-image apptainer:t.sif --container-mounts /data:/data,/scratch "
            "--container-args='--env=A=1 -c' --role r x.py",
        ),
        (
            "podman run --rm -it --network host -v /data:/data:ro -e A=1 -w /work my/image "
            "python3 -m torch.distributed.run x.py",
            "--container-workdir /work --container-image podman:my/image --container-mounts /data:/data:ro "
            "--container-args='-e A=1' x.py",
        ),
        (
            "singularity exec --nv --bind=/data t.sif python -m torch.distributed.run x.py",
            "--container-image singularity:t.sif --container-mounts /data x.py",
        ),
        (
            "ch-run -b /data:/mnt --write /images/t -- torchrun x.py",
            "--container-image charliecloud:/images/t --container-mounts /data:/mnt --container-args=--write x.py",
        ),
    ],
)
def test_a_containers_command_line_is_taken_over(line: str, command: str) -> None:
    found = convert(f"#SBATCH --nodes=2\nsrun {line}\n")
    assert found.command == f"hpc-elastic submit --nodes 2 {command}"
    assert not found.left


def test_a_runscript_is_left_to_the_user() -> None:
    found = convert("#SBATCH --nodes=2\nsrun singularity run --nv t.sif torchrun --nnodes 2 x.py\n")
    assert found.command == "hpc-elastic submit --nodes 2 --container-image singularity:t.sif x.py"
    (left,) = found.left
    assert "singularity run has the image's runscript start the command: it is left out" in left.why


@pytest.mark.parametrize(
    "line", ["apptainer run t.sif x.py", "podman exec c python x.py", "ch-run /images/t", "podman"]
)
def test_other_commands_of_a_runtime_are_not_guessed(line: str) -> None:
    with pytest.raises(UsageError):
        convert(f"#SBATCH --nodes=2\nsrun {line}\n")


@pytest.mark.parametrize("path", sorted(FILES.iterdir()), ids=lambda path: path.name)
def test_every_line_has_its_fate(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    try:
        found = convert(text)
    except UsageError:
        return
    numbers = {line.number for line in found.lines}
    continued = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and (not line.startswith("#") or line.startswith(("#SBATCH", "#!"))) and not continued:
            assert number in numbers, line
        continued = line.endswith("\\")
    assert all(line.why for line in found.lines)
    assert any(line.fate is Fate.TAKEN for line in found.lines)


def test_a_command_that_submit_would_refuse_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.sh"
    path.write_text("#SBATCH --nodes=2\n#SBATCH --time=soon\nsrun torchrun --nnodes 2 train.py\n")
    assert main(["convert", str(path)]) == 2
    assert "--time soon: not a time" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "absent")]) == 2
    assert "absent can't be read: No such file or directory" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert main(["convert", str(tmp_path / "binary")]) == 2
    assert "binary is not UTF-8 text" in capsys.readouterr().err
