"""A real Slurm of several nodes on one machine, as a context manager."""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from . import configuration, services
from .configuration import Settings
from .hosts import Hosts, remove_namespaces
from .layout import CONTROLLER, LOGIN, RIGS_FOLDER, USERS, Layout, RigError
from .lock import RigLock, lock_free_name
from .processes import CommandFailed, RigProcess, call, command_line, owner_of, wait_until
from .python_environment import PythonEnvironment, python_environment

AUTOMATIC_NAME = "auto"

ENDED_STATES = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split()
)
"""A job in one of these has ended (though a requeue may start it again)."""

_HEALTHY = frozenset({"idle", "mixed", "allocated", "completing"})


class SlurmCluster:
    """A Slurm of `nodes` nodes named n1, n2 …, a controller host ``ctl`` and a login host ``login``.

    Each host has its own name, address, processes, /tmp, /var/tmp, /run and /dev/shm. `shared` and the users' homes are
    the same everywhere. Needs root; see `missing_prerequisites`.

        with SlurmCluster(4) as cluster:
            done = cluster.run(["srun", "-N4", "hostname"])

    Args:
        nodes: How many compute nodes.
        name: The rig's name; a rig of that name that nobody holds is removed first. By default the first free one.
        accounting: Whether slurmdbd and MariaDB run.
        python: Whether jobs get a Python environment (`environment`).
        settings: Lines of slurm.conf that override the rig's own; ``None`` leaves a line out.
        options: The other fields of `Settings`: cpus, memory_mb, gpus, cred_expire, max_time, extra_lines.

    Attributes:
        layout: Where its files lie.
        settings: What it was started with.
        environment: The Python environment for jobs, or ``None``.
    """

    def __init__(
        self,
        nodes: int = 4,
        *,
        name: str | None = None,
        accounting: bool = True,
        python: bool = True,
        settings: Mapping[str, str | int | None] | None = None,
        **options: object,
    ) -> None:
        self._name = name
        self._wants_python = python
        self.layout = Layout(name=name or AUTOMATIC_NAME, nodes=nodes)
        self.settings = Settings(accounting=accounting, slurm_conf=dict(settings or {}), **options)  # type: ignore[arg-type]
        self.environment: PythonEnvironment | None = None
        self._hosts = Hosts(self.layout)
        self._lock: RigLock | None = None

    # Life ------------------------------------------------------------------------------------------------------------

    @classmethod
    def attach(cls, name: str) -> SlurmCluster:
        """A rig that another process started and left running.

        Raises:
            RigError: None of that name is up.
        """
        try:
            described = json.loads(Layout(name=name, nodes=1).description.read_text())
        except FileNotFoundError:
            raise RigError(f"no rig {name!r} is up; start one with: up 4 --name {name}") from None
        options = described["settings"]
        settings = options.pop("slurm_conf")
        cluster = cls(described["nodes"], name=name, settings=settings, **options)
        if (folder := described["python"]) is not None:
            mounts = {Path(where): Path(what) for where, what in described["mounts"].items()}
            cluster.environment = PythonEnvironment(folder=Path(folder), mounts=mounts)
        return cluster

    def start(self) -> None:
        """Start everything and wait until all nodes are idle; whatever an earlier rig of this name left goes first.

        Raises:
            RigError: The name is in use, or something did not come up; nothing is left running then.
        """
        if self._name is None:
            # A rig that was left running on purpose has a description and nobody's lock: it is not ours to take.
            self._lock = lock_free_name(AUTOMATIC_NAME, wanted=lambda folder: not (folder / "keep").exists())
            self.layout = dataclasses.replace(self.layout, name=self._lock.name)
            self._hosts = Hosts(self.layout)
        else:
            self._lock = RigLock(self._name)
        try:
            self._remove_everything()
            self._make_folders()
            with ThreadPoolExecutor(2) as pool:
                environment = pool.submit(python_environment, self.layout.python) if self._wants_python else None
                database = pool.submit(services.install_database, self.layout) if self.settings.accounting else None
                self._hosts.make_switch()
                self.environment = environment.result() if environment else None
                self._write_files()
                self._hosts.boot(self.layout.host_names)
                if database:
                    database.result()
                    services.start_database(self._hosts)
                    services.start_slurmdbd(self._hosts)
            self.start_slurmctld()
            services.start_slurmd(self._hosts, self.layout.node_names, booted=False)
            self.wait_nodes_ready()
        except BaseException as error:
            said = self.logs() if isinstance(error, RigError | subprocess.SubprocessError) else ""
            self.stop()
            if said:
                raise RigError(f"the rig did not start: {error}\n{said}") from error
            raise

    def stop(self) -> None:
        """End every process and remove every namespace, mount and file of the rig. Twice is fine."""
        self._remove_everything()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def detach(self) -> None:
        """Let the rig outlive this process: `attach` finds it again, `stop` removes it."""
        (self.layout.folder / "keep").touch()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _remove_everything(self) -> None:
        remove_namespaces(self.layout.name)
        # All of the rig's mounts were in its hosts' mount namespaces and went with them; should one be left in ours, it
        # is not to be emptied.
        if self.layout.folder.exists():
            call(["rm", "-rf", "--one-file-system", str(self.layout.folder)])

    def _make_folders(self) -> None:
        layout = self.layout
        RIGS_FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
        for folder in (layout.folder, layout.homes, layout.etc, layout.logs, layout.boot, layout.spool, layout.shared):
            folder.mkdir()
            folder.chmod(0o755)
        for folder in (layout.munge_key.parent, layout.state):
            folder.mkdir(mode=0o700)
        layout.shared.chmod(0o1777)
        for user in USERS:
            entry = _ensure_user(user)
            home = layout.homes / user
            shutil.copytree("/etc/skel", home)
            home.chmod(0o700)
            for path in (home, *home.rglob("*")):
                os.chown(path, entry.pw_uid, entry.pw_gid)
            Path(entry.pw_dir).mkdir(mode=0o700, exist_ok=True)
        Path("/etc/slurm").mkdir(exist_ok=True)

    def _write_files(self) -> None:
        layout, settings = self.layout, self.settings
        key = layout.munge_key
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(1024))
        layout.hosts_file.write_text(configuration.hosts_file(layout))
        (layout.etc / "slurm.conf").write_text(configuration.slurm_conf(layout, settings))
        (layout.etc / "gres.conf").write_text(configuration.gres_conf(settings))
        (layout.etc / "cgroup.conf").write_text(configuration.cgroup_conf(services.slurm_version()))
        database = layout.etc / "slurmdbd.conf"
        database.touch(mode=0o600)
        database.write_text(configuration.slurmdbd_conf(layout))
        mounts = self.environment.mounts if self.environment else {}
        for host in layout.host_names:
            (layout.boot / f"{host}.sh").write_text(configuration.boot_script(layout, host, mounts=mounts))
        described = {
            "nodes": layout.nodes,
            "settings": dataclasses.asdict(settings),
            "python": str(self.environment.folder) if self.environment else None,
            "mounts": {str(where): str(what) for where, what in mounts.items()},
        }
        layout.description.write_text(json.dumps(described, indent=1))

    # Commands --------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def node_names(self) -> tuple[str, ...]:
        return self.layout.node_names

    @property
    def shared(self) -> Path:
        """A folder at the same path on all hosts and outside, where every user may make files (mode 1777)."""
        return self.layout.shared

    def home(self, user: str) -> Path:
        """The user's home as seen from outside; on every host it is /home/<user>."""
        return self.layout.homes / user

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "alice",
        node: str | None = None,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
    ) -> RigProcess:
        """Start a command on a host as a user in a fresh login's environment, plus `env`; text pipes by default.

        Args:
            argv: The command; the environment's Python and the project's console script are on its PATH.
            user: alice, mallory or root.
            node: Which host; the login host by default.
            cwd: `shared` by default. As the host sees it.
            env: Further variables.
            stdin: As in subprocess, likewise `stdout` and `stderr`.
        """
        entry = pwd.getpwnam(user)
        argv = ["env", "-C", str(cwd or self.shared), *argv]
        if user != "root":
            become = ["setpriv", "--reuid", user, "--regid", str(entry.pw_gid), "--init-groups", "--"]
            argv = [*become, *argv]
        path = "/usr/local/bin:/usr/bin:/bin"
        if user == "root":
            path = f"/usr/local/sbin:/usr/sbin:/sbin:{path}"
        if self.environment is not None:
            path = f"{self.environment.bin}:{path}"
        login = {
            "PATH": path,
            "HOME": entry.pw_dir,
            "USER": user,
            "LOGNAME": user,
            "SHELL": entry.pw_shell,
            "LANG": "C.UTF-8",
        }
        return RigProcess(
            [*self._hosts.enter_argv(node or LOGIN), *argv],
            env={**login, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "alice",
        node: str | None = None,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        check: bool = False,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; see `popen`.

        Args:
            timeout: Seconds; past them the command is killed.
            check: Whether another code than 0 is an error.
            input: Text for its stdin, which is empty otherwise.

        Raises:
            subprocess.TimeoutExpired: It took too long.
            CommandFailed: It failed and `check` is true.
        """
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        with self.popen(argv, user=user, node=node, cwd=cwd, env=env, stdin=stdin) as process:
            try:
                stdout, stderr = process.communicate(input, timeout=timeout)
            except BaseException:
                process.kill()
                raise
        if check and process.returncode != 0:
            raise CommandFailed(process.returncode, list(argv), stdout, stderr)
        return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)

    def _root(self, *argv: str, check: bool = True, timeout: float = 60) -> str:
        """Run a Slurm command as its administrator on the controller, and return its stdout."""
        return self.run(argv, user="root", node=CONTROLLER, check=check, timeout=timeout).stdout

    # Nodes -----------------------------------------------------------------------------------------------------------

    def kill_node(self, name: str) -> None:
        """Cut the node's power: its processes are gone, its peers hear nothing. A node that is off stays off."""
        self._hosts.power_off(self._node(name))

    def start_node(self, name: str, *, booted: bool = True, wait: bool = True) -> None:
        """Boot the node that is off, or start its slurmd where only that is gone. A node that is up stays so.

        Args:
            name: Which.
            booted: Whether slurmd reports the reboot, as a real one's boot time does; otherwise Slurm does not notice a
                reboot within SlurmdTimeout.
            wait: Whether to wait until Slurm would run jobs on it.
        """
        if not self._hosts.is_on(self._node(name)):
            self._hosts.boot([name])
        if not services.slurmd_runs(self._hosts, name):
            services.start_slurmd(self._hosts, [name], booted=booted)
        if wait:
            self.wait_nodes_ready([name])

    def cut_link(self, name: str) -> None:
        """Pull the host's network cable."""
        self._hosts.set_link(name, up=False)

    def heal_link(self, name: str) -> None:
        """Plug the host's network cable in again."""
        self._hosts.set_link(name, up=True)

    def drain(self, name: str, *, reason: str = "drained by the rig") -> None:
        """Let Slurm start nothing new on the node."""
        self._root("scontrol", "update", f"nodename={self._node(name)}", "state=drain", f"reason={reason}")

    def undrain(self, name: str) -> None:
        """Let Slurm use the node again, whether it was drained or set down; one in use already is fine."""
        self._root("scontrol", "update", f"nodename={self._node(name)}", "state=resume", check=False)

    def node_state(self, name: str) -> str:
        """What Slurm calls the node's state, such as ``idle``, ``down*``, ``draining``."""
        return self.node_states().get(self._node(name), "unknown")

    def node_states(self) -> dict[str, str]:
        """Every node's state."""
        lines = self._root("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return {words[0]: words[1] for line in lines if len(words := line.split()) == 2}

    def wait_node(self, name: str, states: Collection[str], *, timeout: float = 60) -> str:
        """Wait until the node is in one of `states`, a trailing ``*`` (does not answer) aside, and return that."""
        seen = ""

        def reached() -> bool:
            nonlocal seen
            seen = self.node_state(name)
            return seen.rstrip("*") in states

        wait_until(reached, timeout=timeout, what=f"node {name} is {' or '.join(states)}", interval=0.2)
        return seen

    def wait_nodes_ready(self, names: Sequence[str] | None = None, *, timeout: float = 30) -> None:
        """Wait until Slurm would run jobs on the nodes (all by default)."""
        wanted = names or self.node_names

        def ready() -> bool:
            states = self.node_states()
            return all(states.get(name) in _HEALTHY for name in wanted)

        wait_until(ready, timeout=timeout, what=f"{' '.join(wanted)} are ready", interval=0.05)

    def _node(self, name: str) -> str:
        if name not in self.node_names:
            raise RigError(f"node {name!r} is none of {' '.join(self.node_names)}")
        return name

    # Processes -------------------------------------------------------------------------------------------------------

    def node_pids(self, name: str, *, user: str | None = None) -> list[tuple[int, str]]:
        """The host's processes as (pid as numbered outside, command line), all or one user's; none when it is off."""
        wanted = None if user is None else pwd.getpwnam(user).pw_uid
        pids = [pid for pid in self._hosts.pids(name) if wanted is None or owner_of(pid) == wanted]
        return [(pid, line) for pid in pids if (line := command_line(pid))]

    def kill_process(self, node: str, target: str | int, sig: int = signal.SIGKILL) -> list[int]:
        """Send a signal to one process, or to all whose command line has a match of the regular expression `target`.

        Returns:
            The processes' numbers outside.

        Raises:
            RigError: None matches.
        """
        if isinstance(target, int):
            pids = [target]
        else:
            pids = [pid for pid, line in self.node_pids(node) if re.search(target, line)]
        if not pids:
            raise RigError(f"no process on {node} matches {target!r}")
        self._hosts.kill(node, pids, sig)
        return pids

    # Jobs ------------------------------------------------------------------------------------------------------------

    def job_info(self, job_id: int | str) -> dict[str, str]:
        """What ``scontrol show job`` says of the job, by its field names; empty when Slurm has forgotten it."""
        text = self._root("scontrol", "--oneliner", "show", "job", str(job_id), check=False)
        fields = re.split(r"(?:^|\s)([A-Za-z/:]+)=", text.partition("\n")[0])
        return {key: value.strip() for key, value in zip(fields[1::2], fields[2::2], strict=True)}

    def job_state(self, job_id: int | str) -> str:
        """The job's state, such as PENDING, from the controller or, once that forgot it, from the accounting.

        Returns:
            An empty text where neither knows the job.
        """
        state = self.job_info(job_id).get("JobState", "")
        if not state and self.settings.accounting:
            rows = self.sacct(job_id, fields=("State",), options=("--allocations",))
            state = rows[-1]["State"].split()[0] if rows else ""
        return state

    def wait_job(self, job_id: int | str, states: Collection[str] = ENDED_STATES, *, timeout: float = 60) -> str:
        """Wait until the job is in one of `states` and return that.

        Raises:
            RigError: It was not in time; the message has what Slurm says of the job.
        """
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while (state := self.job_state(job_id)) not in wanted:
            if time.monotonic() > deadline:
                raise RigError(
                    f"job {job_id} was not {'/'.join(sorted(wanted))} in {timeout:g} s: {self.job_info(job_id)}"
                )
            time.sleep(0.1)
        return state

    def sacct(
        self,
        job_id: int | str,
        *,
        fields: Sequence[str] = ("JobID", "State", "ExitCode", "NodeList", "NNodes"),
        options: Sequence[str] = (),
    ) -> list[dict[str, str]]:
        """The accounting's rows of the job and its steps, by field name."""
        argv = ["sacct", "--parsable2", "--noheader", f"--format={','.join(fields)}", f"--jobs={job_id}", *options]
        lines = self._root(*argv).splitlines()
        return [dict(zip(fields, line.split("|"), strict=True)) for line in lines]

    def cancel_all_jobs(self, *, timeout: float = 30) -> None:
        """Kill every job and wait until none is left running or pending."""

        def gone() -> bool:
            jobs = self._root("squeue", "--noheader", "--format=%A").split()
            if jobs:
                self._root("scancel", "--full", "--signal=KILL", *jobs, check=False)
                self._root("scancel", *jobs, check=False)
            return not jobs

        wait_until(gone, timeout=timeout, what="all jobs are gone", interval=0.3)

    # Services --------------------------------------------------------------------------------------------------------

    def stop_slurmctld(self) -> None:
        """Kill the controller's daemon, as a crash does; one that is not running is fine."""
        services.stop_slurmctld(self._hosts)

    def start_slurmctld(self) -> None:
        """Start the controller's daemon and wait until it listens; one that is running is fine."""
        services.start_slurmctld(self._hosts)

    def heal(self) -> None:
        """Bring the rig back to how it was after its start, but for what lies in `shared` and the homes."""
        self.start_slurmctld()
        for name in self.node_names:
            if self._hosts.is_on(name):
                self.heal_link(name)
            self.start_node(name, wait=False)
        self.cancel_all_jobs()
        for name, state in self.node_states().items():
            if state.rstrip("*") not in _HEALTHY:
                self.undrain(name)
        self.wait_nodes_ready()

    def logs(self, *, limit: int = 6000) -> str:
        """The end of every daemon's log and, where the controller answers, what it says of nodes and jobs.

        Args:
            limit: Characters of each.
        """
        parts = []
        if self.layout.logs.is_dir():
            for path in sorted(self.layout.logs.iterdir()):
                text = path.read_text(errors="replace").strip()[-limit:]
                if text:
                    parts.append(f"--- {path.name}\n{text}")
        for argv in (["sinfo", "-N", "-l"], ["squeue", "-l"], ["scontrol", "show", "jobs"]):
            try:
                parts.append(f"--- {' '.join(argv)}\n{self._root(*argv, check=False, timeout=20).strip()[-limit:]}")
            except (RigError, OSError, subprocess.SubprocessError) as error:
                parts.append(f"--- {' '.join(argv)}\n{error}")
        return "\n".join(parts)


def _ensure_user(name: str) -> pwd.struct_passwd:
    """The user's entry; the user is made where there is none."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        call(["useradd", "--create-home", "--shell", "/bin/bash", name], check=False)
    return pwd.getpwnam(name)
