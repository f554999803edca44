"""Which layer gives a value, and what is said where a layer is wrong."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import hpc_elastic
from hpc_elastic.base import files
from hpc_elastic.errors import UsageError
from hpc_elastic.options import config_files, job_options, worker_options
from hpc_elastic.options.config_files import Layer
from hpc_elastic.options.job_options import SBATCH_VARIABLES
from hpc_elastic.options.resolve import NOT_SETTINGS, Resolved, arguments, configured_runs_dir, resolve
from hpc_elastic.options.run_request import ALL_OPTIONS, check_values
from hpc_elastic.options.table import Keys, explaining, parse, variable_of
from hpc_elastic.submission.executor import unknown


class Place:
    """A machine with a site's, a user's and a project's file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.here = root / "project" / "deep"
        self.here.mkdir(parents=True)
        self.env: dict[str, str] = {"HOME": str(root / "home"), "XDG_CONFIG_DIRS": str(root / "etc"), "USER": "me"}

    def write(self, layer: str, text: str) -> Path:
        path = {
            "site": self.root / "etc" / "hpc_elastic" / "config.toml",
            "user": self.root / "home" / ".config" / "hpc_elastic" / "config.toml",
            "project": self.root / "project" / "hpc_elastic.toml",
            "pyproject": self.root / "project" / "pyproject.toml",
        }[layer]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def resolve(self, *argv: str, left_out: tuple[str, ...] = (), **env: str) -> Resolved:
        given = parse(argv, ALL_OPTIONS, refused=worker_options.REFUSED)
        environ: Mapping[str, str] = {**self.env, **env}
        return resolve(given, ALL_OPTIONS, env=environ, here=self.here, left_out=left_out, yields=SBATCH_VARIABLES)

    def refused(self, *argv: str, **env: str) -> str:
        with pytest.raises(UsageError) as caught:
            found = self.resolve(*argv, **env).parsed
            with explaining(found):
                check_values(found)
        return str(caught.value)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_each_layer_wins_over_those_below(place: Place) -> None:
    assert place.resolve().parsed.get("max_restarts") is None
    for number, layer in enumerate(("site", "user", "project")):
        path = place.write(layer, f"max-restarts = {number}\n")
        found = place.resolve()
        assert found.parsed.get("max_restarts") == str(number)
        assert (found.origins["max_restarts"].layer.value, found.origins["max_restarts"].where) == (layer, f"{path}:1")
    ours = {"PET_MAX_RESTARTS": "3", "HPC_ELASTIC_MAX_RESTARTS": "4"}
    for argv, env, value, where in (
        ([], {"PET_MAX_RESTARTS": "3"}, "3", "PET_MAX_RESTARTS"),
        ([], ours, "4", "HPC_ELASTIC_MAX_RESTARTS"),
        (["--max-restarts", "5"], ours, "5", "--max-restarts"),
    ):
        found = place.resolve(*argv, **env)
        assert (found.parsed.get("max_restarts"), found.origins["max_restarts"].where) == (value, where)
    assert found.origins["max_restarts"].layer is Layer.COMMAND_LINE
    assert found.parsed.source("max_restarts", "") == "--max-restarts"


def test_on_a_python_without_tomllib(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.10: tomli is the same by another name, and is installed there."""
    tomllib = pytest.importorskip("tomllib")
    monkeypatch.setitem(sys.modules, "tomli", tomllib)
    monkeypatch.setitem(sys.modules, "tomllib", None)  # an import of it fails
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    path = place.write("site", "max-restarts = 7\n")
    assert place.resolve().parsed.get("max_restarts") == "7"
    path.write_text("max-restarts = = 7\n")
    with pytest.raises(UsageError, match=rf"{path}:1: invalid TOML"):
        place.resolve()
    project = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    assert "\"tomli>=2; python_version < '3.11'\"" in project


def test_a_profile_wins_over_every_file_and_loses_to_the_environment(place: Place) -> None:
    site = place.write("site", "partition = 'cpu'\n[profile.a100]\npartition = 'a100'\nmem = '100G'\n")
    place.write("project", "partition = 'short'\nmem = '1G'\n[profile.a100]\nmem = '200G'\n[profile.h200]\n")
    assert place.resolve().parsed.get("partition") == "short"
    found = place.resolve("--profile", "a100")
    assert [found.parsed.get("partition"), found.parsed.get("mem"), found.profile] == ["a100", "200G", "a100"]
    origin = found.origins["partition"]
    assert (origin.layer, origin.where, origin.profile) == (Layer.SITE, f"{site}:3", "a100")
    assert place.resolve(HPC_ELASTIC_PROFILE="a100").parsed.get("mem") == "200G"
    assert place.resolve("--profile=h200", HPC_ELASTIC_PROFILE="a100").parsed.get("mem") == "1G"
    assert place.resolve("--profile=a100", HPC_ELASTIC_MEM="7G").parsed.get("mem") == "7G"
    place.write("user", "default-profile = 'a100'\n")
    assert place.resolve().parsed.get("mem") == "200G"
    assert "--profile a10: no file has a [profile.a10]; did you mean a100?" in place.refused("--profile=a10")
    assert "HPC_ELASTIC_PROFILE x: no file has a [profile.x]; there are a100, h200" in place.refused(
        HPC_ELASTIC_PROFILE="x"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# a comment\nmax-restart = 3", ":2: unknown key max-restart; did you mean max-restarts?"),
        ("xyzzy = 1", ":1: unknown key xyzzy; hpc-elastic config --all lists them"),
        ("[profiles.a100]\nmem='1G'", ":1: unknown key profiles; did you mean profile?"),
        ("[profile.a100]\n\nmme='1G'", ":3: unknown key mme; did you mean mem?"),
        ("nodes = true", ":1: nodes = true: give N|MIN-MAX, not a boolean"),
        ("rdzv-conf = {a = 1}", ":1: rdzv-conf = {'a': 1}: give KEY=VALUE,..., not a table"),
        ("requeue = 'yes'", ":1: requeue = yes: give true or false"),
        ("sbatch-arg = [1]", ":1: sbatch-arg = [1]: give an array of strings (ARG each)"),
        ("nodes = 4\nnnodes = 5", ":2: nnodes is nodes once more; give one of them"),
        ("run-id = 'x'", ":1: run-id is allowed on the command line only"),
        ("no-requeue = true", ":1: unknown key no-requeue; did you mean requeue?"),
        ("default-profile = 3", ":1: default-profile = 3: give a profile's name"),
        ("profile = 'a100'", ":1: profile is not a table; write [profile.NAME]"),
        ("partition = gpu", ":1: invalid TOML: Invalid value (strings need quotes)"),
        # What the checks of the values say, which know the option alone.
        ("\nmax-restarts = 'many'", ":2: max-restarts = many: give a whole number from 0 to 1000000"),
        ("time = 'soon'", ":1: time = soon"),
        ("cluster = 'mine'", ":1: cluster = mine: give one of auto, slurm, local"),
        ("sbatch-arg = ['--wrap=x']", ":1: sbatch-arg = --wrap=x: not possible here"),
        ("rdzv-conf = 'timeout'", ":1: rdzv-conf = timeout: 'timeout' is not of the form key=value"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(place: Place, text: str, says: str) -> None:
    path = place.write("user", text)
    assert place.refused().startswith(f"{path}{says}")


def test_a_wrong_variable_is_named_as_the_user_wrote_it(place: Place) -> None:
    assert place.refused(HPC_ELASTIC_SPARES="x").startswith("HPC_ELASTIC_SPARES x: give a number of nodes")
    assert place.refused(HPC_ELASTIC_REQUEUE="maybe") == "HPC_ELASTIC_REQUEUE=maybe: give 1 or 0"
    near = place.refused(HPC_ELASTIC_MAX_RESTART="3")
    assert near.startswith("unknown variable HPC_ELASTIC_MAX_RESTART; did you mean HPC_ELASTIC_MAX_RESTARTS?")
    place.resolve(HPC_ELASTIC_SOMETHING_ELSE="1", **dict.fromkeys(NOT_SETTINGS - {"HPC_ELASTIC_PROFILE"}, ""))


def test_a_removed_option_names_what_to_use_wherever_it_stands(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_options, "REMOVED", {"--old-way": "use --nodes"})
    assert place.refused(HPC_ELASTIC_OLD_WAY="1") == "HPC_ELASTIC_OLD_WAY was removed: use --nodes; unset the variable"
    with pytest.raises(UsageError, match=r"\Aelastic_old_way was removed: use --nodes\Z"):
        arguments({"old_way": "1"}, ALL_OPTIONS, command=(), prefix="elastic_")
    assert str(unknown("old_way")) == "old_way was removed: use --nodes"
    path = place.write("project", "old-way = 1\n")
    assert place.refused() == f"{path}:1: old-way was removed: use --nodes"


def test_switches_lists_and_times(place: Place) -> None:
    place.write(
        "site",
        "requeue = false\nexclusive = true\nwait = true\nmodule = true\nsbatch-arg = ['--licenses=m', '-Lx']\n"
        "time = 04:00:00\nbegin = 2026-12-01T10:00:00\nrestart-window = 1.5\n",
    )
    parsed = place.resolve().parsed
    assert not job_options.wants_requeue(parsed)
    assert (parsed.flag("wait"), parsed.flag("module")) == (True, True)
    assert parsed.all("sbatch_args") == ("--licenses=m", "-Lx")
    dests = ("exclusive", "time", "begin", "restart_window")
    assert [parsed.get(dest) for dest in dests] == ["", "04:00:00", "2026-12-01T10:00:00", "1.5"]
    place.write("user", "requeue = true\nexclusive = false\nwait = false\nsbatch-arg = []\nbegin = ''\n")
    parsed = place.resolve().parsed
    assert job_options.wants_requeue(parsed)
    assert (parsed.flag("wait"), parsed.all("sbatch_args")) == (False, ())
    assert [parsed.get(dest) for dest in dests] == [None, "04:00:00", None, "1.5"]
    parsed = place.resolve(HPC_ELASTIC_REQUEUE="no", HPC_ELASTIC_SBATCH_ARG="'--comment=a b' -Ly").parsed
    assert not job_options.wants_requeue(parsed)
    assert parsed.all("sbatch_args") == ("--comment=a b", "-Ly")


def test_what_sbatch_reads_from_the_environment_wins_over_files_alone(place: Place) -> None:
    place.write("user", "partition = 'mine'\ntime = '1:00'\n")
    found = place.resolve(SBATCH_PARTITION="theirs", SBATCH_TIMELIMIT="5")
    assert found.parsed.get("partition") is None
    assert found.parsed.get("time") is None
    assert found.origins["partition"].where == "SBATCH_PARTITION, which sbatch reads"
    assert place.resolve("-p", "x", SBATCH_PARTITION="theirs").parsed.get("partition") == "x"
    ours = place.resolve(SBATCH_PARTITION="theirs", HPC_ELASTIC_PARTITION="y").parsed
    assert ours.get("partition") == "y"


def test_paths_in_files(place: Place) -> None:
    place.write("site", "runs-dir = '$SCRATCH/runs/${USER}'\npython = '~/venv/bin/python'\nchdir = 'sub'\n")
    parsed = place.resolve(SCRATCH="/scratch").parsed
    assert parsed.get("runs_dir") == "/scratch/runs/me"
    assert parsed.get("python") == f"{place.root}/home/venv/bin/python"
    assert parsed.get("chdir") == "sub"
    assert place.refused().endswith("config.toml:1: runs-dir = $SCRATCH/runs/${USER}: the variable SCRATCH is not set")
    place.write("project", "runs-dir = 'out'\npython = '.venv/bin/python'\nchdir = '.'\n")
    parsed = place.resolve(SCRATCH="/scratch").parsed
    project = place.root / "project"
    assert [parsed.get(dest) for dest in ("runs_dir", "python", "chdir")] == [
        f"{project}/out", f"{project}/.venv/bin/python", str(project),
    ]  # fmt: skip
    place.write("project", "python = 'python3.12'\n")
    assert place.resolve(SCRATCH="/s").parsed.get("python") == "python3.12"
    assert place.resolve("--runs-dir", "$HOME", SCRATCH="/s").parsed.get("runs_dir") == "$HOME", "the shell's business"


def test_the_projects_file_is_the_first_one_upwards(place: Place) -> None:
    (place.root / "hpc_elastic.toml").write_text("nodes = 9\n")
    pyproject = place.write("pyproject", "this is no TOML at all")
    assert place.resolve().parsed.get("nodes") == "9", "one that is not ours is not judged"
    pyproject.write_text("[tool.hpc-elastic]\nnodes = 2\n[tool.hpc-elastic.profile.big]\nnodes = 8\n")
    assert place.resolve().origins["nodes"].where == f"{pyproject}:2"
    assert place.resolve("--profile=big").origins["nodes"].where == f"{pyproject}:4"
    pyproject.write_text("[tool.hpc_elastic]\nnode = 2\n")
    assert place.refused().startswith(f"{pyproject}:2: unknown key node; did you mean nodes?")
    pyproject.write_text("[tool.hpc-elastic]\nnodes = 2\n")
    place.write("project", "nodes = 3\n")
    found = place.resolve()
    assert found.parsed.get("nodes") == "3"
    states = {file.path: state for file, state in found.files}
    assert states[pyproject].startswith("not read, ")
    (place.root / "hpc_elastic.toml").unlink()
    os.mkfifo(place.root / "hpc_elastic.toml")
    assert place.resolve().parsed.get("nodes") == "3", "those above one that is read are not looked at"
    (place.here / ".git").mkdir()
    assert place.resolve().parsed.get("nodes") is None, "a repository ends the search"


def test_variables_name_other_files_or_none(place: Place, tmp_path: Path) -> None:
    place.write("site", "nodes = 1\n")
    place.write("project", "spares = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("nodes = 5\n")
    found = place.resolve(HPC_ELASTIC_SITE_CONFIG=str(other), HPC_ELASTIC_PROJECT_CONFIG="")
    assert found.parsed.get("nodes") == "5"
    assert found.parsed.get("spares") is None
    missing = place.refused(HPC_ELASTIC_SITE_CONFIG="/nowhere/x.toml")
    assert missing == "HPC_ELASTIC_SITE_CONFIG=/nowhere/x.toml: No such file or directory"


ME, STRANGER = 1234, 4321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")


def own(uid: int, *paths: Path) -> None:
    for path in paths:
        os.chown(path, uid, uid, follow_symlinks=False)


@as_root
@pytest.mark.parametrize(
    ("me", "uid", "trusted"), [(ME, ME, True), (ME, 0, True), (ME, STRANGER, False), (0, 0, True), (0, STRANGER, False)]
)
def test_a_file_is_read_of_its_user_and_of_root(
    place: Place, monkeypatch: pytest.MonkeyPatch, me: int, uid: int, trusted: bool
) -> None:
    """Whose the folder is does not matter: who owns a folder in /tmp owns what is in it."""
    path = place.write("project", "python = '/opt/python'\n")
    own(uid, path, path.parent)
    monkeypatch.setattr(files.os, "geteuid", lambda: me)
    if trusted:
        assert place.resolve().parsed.get("python") == "/opt/python"
        return
    refused = place.refused()
    assert f"{path} belongs to uid {uid}, not to you (uid {me}); " in refused
    assert "HPC_ELASTIC_PROJECT_CONFIG= (empty)" in refused
    assert place.resolve(HPC_ELASTIC_PROJECT_CONFIG="").parsed.get("python") is None
    if me:
        assert place.resolve(HPC_ELASTIC_PROJECT_CONFIG=str(path)).parsed.get("python") == "/opt/python"
    else:
        assert "root reads root's own files only" in place.refused(HPC_ELASTIC_PROJECT_CONFIG=str(path))


@as_root
def test_a_link_is_judged_and_so_is_what_it_leads_to(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, uid in (("mine", ME), ("theirs", STRANGER)):
        (place.root / name).write_text("nodes = 3\n")
        own(uid, place.root / name)
    monkeypatch.setattr(files.os, "geteuid", lambda: ME)
    link = place.root / "project" / "hpc_elastic.toml"
    for owner, target, says in (
        (ME, "../mine", None),
        (STRANGER, "../mine", "hpc_elastic.toml is a symbolic link that belongs to uid 4321, not to you"),
        (ME, "../theirs", "hpc_elastic.toml belongs to uid 4321, not to you"),
    ):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        own(owner, link)
        if says is None:
            assert place.resolve().parsed.get("nodes") == "3"
        else:
            assert says in place.refused()
    middle = place.root / "middle"
    middle.symlink_to("mine")
    own(STRANGER, middle)
    link.unlink()
    link.symlink_to("../middle")
    assert "middle is a symbolic link that belongs to uid 4321" in place.refused()
    link.unlink()
    link.symlink_to(link.name)
    own(ME, link)
    assert place.resolve().parsed.get("nodes") is None, "a link to itself leads nowhere"


def test_a_file_that_everybody_may_write_or_that_is_none_is_refused(place: Place) -> None:
    """Another user may link a file of root's to a name of their own where they may write to it."""
    path = place.write("project", "nodes = 3\n")
    path.chmod(0o666)
    assert f"{path} can be written by every user; run: chmod o-w {path}" in place.refused()
    for name in ("hpc_elastic.toml", "pyproject.toml"):
        path.unlink()
        path = place.root / "project" / name
        os.mkfifo(path)
        assert f"{path} is not a regular file" in place.refused()
        path.unlink()
        path.mkdir()
        assert f"{path} is not a regular file" in place.refused()
        path.rmdir()
        path.symlink_to("/dev/zero")
        assert f"{path} is not a regular file" in place.refused()


@as_root
def test_names_that_are_exchanged_bring_in_no_strangers_values(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an attacker does with two names: what was judged is what is read, whichever of them that is."""
    path = place.write("project", "python = '/good'\n")
    evil = place.root / "project" / "evil"
    evil.write_text("python = '/evil'\n")
    own(STRANGER, evil)
    monkeypatch.setattr(files.os, "geteuid", lambda: ME)

    def exchanging(name: str):  # type: ignore[no-untyped-def]
        real = getattr(os, name)

        def exchange(*args, **kwargs):  # type: ignore[no-untyped-def]
            for old, new in ((path, "between"), (evil, path.name), (path.parent / "between", evil.name)):
                os.rename(old, path.with_name(new))
            return real(*args, **kwargs)

        return exchange

    for name in ("open", "fstat", "read", "stat"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, name, exchanging(name))
            try:
                found = place.resolve().parsed.get("python")
            except UsageError as error:
                found = str(error)
            assert found == "/good" or "belongs to uid 4321" in found


@as_root
def test_a_strangers_pyproject_that_does_not_mention_us_is_left_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place.write("pyproject", "[project]\nname = 'theirs'\n")
    own(STRANGER, path)
    monkeypatch.setattr(files.os, "geteuid", lambda: ME)
    assert place.resolve().parsed.values == {}
    path.write_text("[project]\ndependencies = ['hpc-elastic']\n[project.scripts]\nhpc-elastic = 'x:y'\n[tool.other]\n")
    assert place.resolve().parsed.values == {}
    for text in (
        "[tool.hpc-elastic]\nnodes = 3\n", "[tool . 'hpc_elastic' . profile.x]\n", "[tool]\nhpc-elastic.nodes = 3\n",
        "tool.hpc-elastic = {nodes = 3}\n",
    ):  # fmt: skip
        path.write_text(text)
        assert f"{path} belongs to uid 4321" in place.refused(), text


@pytest.mark.parametrize(
    ("text", "says"),
    [("a = " + "[" * 10_000, ": nested too deeply"), ("# " + "x" * 300_000, " is larger than 262144 bytes")],
)
def test_a_file_that_no_person_writes_is_refused(place: Place, text: str, says: str) -> None:
    pyproject = place.write("pyproject", text)
    assert place.resolve().parsed.values == {}, "of another purpose"
    pyproject.write_text(f"{text}\n[tool.hpc-elastic]\nnodes = 3\n")
    assert f"{pyproject}{says}" in place.refused()
    path = place.write("user", text)
    assert f"{path}{says}" in place.refused()


@pytest.mark.parametrize(
    "text", ["[" + " " * 250_000, '"' + '\\\\"' * 100_000, "'a" * 100_000, "a" * 250_000, "a " * 100_000]
)
def test_a_file_of_nonsense_takes_no_time(place: Place, text: str) -> None:
    place.write("user", text)
    began = time.process_time()
    assert "config.toml" in place.refused()
    config_files._lines_of_keys(text)
    assert time.process_time() - began < 5


def test_dots_and_brackets_in_strings_and_comments_are_no_depth(place: Place) -> None:
    dots, brackets = "a." * 100, "[{" * 100
    place.write(
        "user",
        f'# {dots} {brackets}\njob-name = \'{dots}{brackets}\'\nmem = "{dots}\\"{brackets}" # {dots}\n'
        f'comment = """\n{dots} "" {brackets}\n"""\n'
        f"sbatch-arg = [{', '.join([repr(dots)] * 100)}]\nrestart-window = 1.5\n",
    )
    assert place.resolve().parsed.get("job_name") == f"{dots}{brackets}"


@pytest.mark.parametrize("text", ["runs-dir = 'a\\u0000b'", "sbatch-arg = ['-x', '\\u0000']", "partition = 'a\\u0000'"])
def test_a_nul_is_refused_with_its_line(place: Place, text: str) -> None:
    path = place.write("user", text.replace("'", '"'))
    assert place.refused().startswith(f"{path}:1: {text.split(' ')[0]} = ")
    assert "paths and arguments can't contain a NUL character" in place.refused()


def test_what_files_say_of_what_is_executed_is_known_with_its_line(place: Place) -> None:
    text = "python = '/site/python'\npartition = 'gpu'\nsrun-arg = ['--container-image=x', '-v']\ncontainer = '/oci'\n"
    site = place.write("site", text)
    assert place.resolve().parsed.executed == (
        f"{site}:1: python = /site/python",
        f"{site}:4: container = /oci",
        f"{site}:3: srun-arg = --container-image=x -v",
    )
    mine = place.write("project", "[profile.a]\npython = '/mine/python'\nmodule = true\n")
    assert place.resolve("--profile=a", "--srun-arg=-v", "--container=x").parsed.executed == (
        f"{mine}:3 [profile.a]: module = true",
        f"{mine}:2 [profile.a]: python = /mine/python",
    )
    assert f"{mine}:2" not in str(place.resolve("--profile=a", HPC_ELASTIC_PYTHON="/x").parsed.executed)


def test_what_a_subcommand_does_not_take_is_checked_and_left_out(place: Place) -> None:
    place.write("user", "wait = true\npartition = 'gpu'\n")
    assert not place.resolve(left_out=["wait"]).parsed.flag("wait")
    assert job_options.only_for_slurm(place.resolve("-t", "5").parsed) == ["-t"], "files ask for nothing here"
    place.write("user", "wait = 'long'\n")
    assert "wait = long: give true or false" in place.refused()


def test_arguments_of_a_program_are_the_top_layer(place: Place) -> None:
    path = place.write("project", "max-restarts = 1\nspares = 2\npartition = 'gpu'\n")
    given = arguments({"max_restarts": 5, "partition": None, "requeue": False}, ALL_OPTIONS, prefix="elastic_")
    found = resolve(given, ALL_OPTIONS, env=place.env, here=place.here)
    assert (found.parsed.get("max_restarts"), found.parsed.get("spares")) == ("5", "2")
    assert found.parsed.get("partition") == "gpu"
    assert not job_options.wants_requeue(found.parsed)
    assert found.origins["spares"].where == f"{path}:2"
    with pytest.raises(UsageError, match="unknown parameter elastic_max_restart; did you mean elastic_max_restarts"):
        arguments({"max_restart": 5}, ALL_OPTIONS, prefix="elastic_")
    with pytest.raises(UsageError, match=r"elastic_nodes = true: give N\|MIN-MAX, not a boolean"):
        arguments({"nodes": True}, ALL_OPTIONS, prefix="elastic_")
    wrong = resolve(arguments({"spares": "x"}, ALL_OPTIONS, prefix="elastic_"), ALL_OPTIONS, env={}, here=place.here)
    with pytest.raises(UsageError, match="elastic_spares = x: give a number"), explaining(wrong.parsed):
        check_values(wrong.parsed)


def test_where_runs_are_for_those_that_look_at_them(place: Place) -> None:
    assert configured_runs_dir(place.env, place.here) is None
    place.write("user", "runs-dir = '~/runs'\n")
    assert configured_runs_dir(place.env, place.here) == f"{place.root}/home/runs"
    assert configured_runs_dir({**place.env, "PET_LOG_DIR": "/x"}, place.here) == "/x"


def test_variables_that_the_package_sets_are_never_taken_for_a_mistake(place: Place) -> None:
    """A worker may run hpc-elastic itself, with all that its agent gave it."""
    source = "".join(path.read_text(encoding="utf-8") for path in Path(hpc_elastic.__file__).parent.rglob("*.py"))
    names = set(re.findall(r"\"(HPC_ELASTIC_[A-Z_]+[A-Z])\"", source))
    assert {"HPC_ELASTIC_TAG", "HPC_ELASTIC_HEARTBEAT"} <= names
    settings = {variable_of(option) for option in Keys(ALL_OPTIONS).options()}
    assert not NOT_SETTINGS & {variable_of(option) for option in Keys(ALL_OPTIONS).options() if option.in_files}
    for name in (names | NOT_SETTINGS) - settings:
        if not name.endswith(("_CONFIG", "_PROFILE")):
            place.resolve(**{name: "1"})
