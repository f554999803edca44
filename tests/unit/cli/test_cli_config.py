"""``hpc-elastic config``, and that `submit`, `run` and `list` work with what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_elastic.cli import main as cli


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PWD", "SBATCH_PARTITION", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HPC_ELASTIC_SITE_CONFIG", str(tmp_path / "site.toml"))
    monkeypatch.setenv("HPC_ELASTIC_USER_CONFIG", "")
    (tmp_path / "site.toml").write_text("partition = 'gpu'\n[profile.big]\nnodes = '6-8'\n")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "hpc_elastic.toml").write_text("max-restarts = 7\nruns-dir = 'results'\nfollow = true\n")
    (folder / "train.py").write_text("print()\n")
    monkeypatch.chdir(folder)
    return folder


def test_each_value_has_its_origin(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_TEE", "3")
    assert cli.main(["config", "--profile", "big", "--mem", "3G"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    site, own = project.parent / "site.toml", project / "hpc_elastic.toml"
    assert lines["site"] == ["site", str(site), "(read)"]
    assert lines["project"] == ["project", str(own), "(read)"]
    assert lines["nodes"] == ["nodes", "6-8", f"{site}:3", "[profile.big]"]
    assert lines["partition"] == ["partition", "gpu", f"{site}:1"]
    assert lines["max-restarts"] == ["max-restarts", "7", f"{own}:1"]
    assert lines["runs-dir"] == ["runs-dir", f"{project}/results", f"{own}:2"]
    assert lines["follow"] == ["follow", "true", f"{own}:3"]
    assert lines["tee"] == ["tee", "3", "PET_TEE"]
    assert lines["mem"] == ["mem", "3G", "--mem"]
    assert lines["grace"] == ["grace", "120", "default"]
    assert "qos" not in lines
    assert cli.main(["config", "qos", "nnodes"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["qos    -  not set", "nodes  1  default"]


def test_as_json(project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "theirs")
    assert cli.main(["config", "--json", "--profile=big"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["profile"] == "big"
    assert value["settings"]["nodes"] == {
        "value": "6-8", "layer": "site", "where": f"{project.parent}/site.toml:3", "profile": "big",
    }  # fmt: skip
    assert value["settings"]["follow"]["value"] is True
    assert value["settings"]["partition"]["where"] == "SBATCH_PARTITION, which sbatch reads"
    assert value["settings"]["max-requeues"] == {"value": "3", "layer": "default", "where": None, "profile": None}
    assert {"layer": "project", "path": f"{project}/hpc_elastic.toml", "state": "read"} in value["files"]


def test_submit_works_with_the_layers(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--cluster=slurm", "--allow-local-runs-dir", "--dry-run", "train.py"]
    assert cli.main(["submit", "--profile=big", *argv]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --partition=gpu" in script
    assert "#SBATCH --nodes=6-8" in script
    assert f"{project}/results/" in script
    assert cli.main(["submit", "-p", "cpu", *argv]) == 0
    assert "#SBATCH --partition=cpu" in capsys.readouterr().out


def test_a_file_on_this_machine_and_those_that_look_at_runs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", "--cluster=local", "--dry-run", "train.py"]) == 0
    printed = capsys.readouterr()
    assert f"run directory   {project}/results/" in printed.out
    assert "means nothing" not in printed.err, "what files say of the cluster is not meant for this machine"
    assert cli.main(["list"]) == 2
    assert f"{project}/results can't be read" in capsys.readouterr().err
    assert cli.main(["report", "20991231-x"]) == 2
    assert f"{project}/results" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nodes = = 1", 'runs-dir = "$NOT_SET_ANYWHERE/runs"'])
def test_a_mistake_in_a_file_keeps_nobody_from_looking_at_runs(
    project: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (project / "runs").mkdir()
    (project / "hpc_elastic.toml").write_text(text + "\n")
    assert cli.main(["list"]) == 0
    said = capsys.readouterr().err
    assert f"{project}/hpc_elastic.toml:1" in said
    assert "; continuing without the configuration\n" in said
    assert f"no such run in {project}/runs" in said
