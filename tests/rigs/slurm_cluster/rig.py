"""A rig's life: started, stopped, left running, found again; and commands run on its hosts."""

from __future__ import annotations

import dataclasses
import json
import pwd
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tests.rigs.nfs_emulator import MountSettings

from . import cgroups, debian_root, emulated_fs, files, services
from .configuration import Settings
from .hosts import Hosts, remove_namespaces
from .layout import CONTROLLER, LOGIN, Layout, RigError
from .lock import RigLock, lock_free_name
from .processes import CROWDED, CommandFailed, RigProcess, call, wait_until
from .python_environment import PythonEnvironment, environment_of_root, python_environment

if TYPE_CHECKING:
    from typing_extensions import Self

AUTOMATIC_NAME = "auto"

HEALTHY_STATES = frozenset({"idle", "mixed", "allocated", "completing"})
"""A node in one of these, and answering, runs jobs."""


class Rig:
    """The part of `SlurmCluster` that knows how to be there; see that for the arguments."""

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
    def attach(cls, name: str) -> Self:
        """A rig that another process started and left running."""
        try:
            described = json.loads(Layout(name=name, nodes=1).description.read_text())
        except FileNotFoundError:
            raise RigError(f"no rig {name!r} is up; start one with: up 4 --name {name}") from None
        options = described["settings"]
        options["fs"] = MountSettings(**options["fs"]) if options["fs"] else None
        settings = options.pop("slurm_conf")
        cluster = cls(described["nodes"], name=name, settings=settings, **options)
        if (folder := described["python"]) is not None:
            mounts = {Path(where): Path(what) for where, what in described["mounts"].items()}
            cluster.environment = PythonEnvironment(folder=Path(folder), mounts=mounts)
        return cluster

    def start(self) -> None:
        """Start everything and wait until all nodes are idle; whatever an earlier rig of this name left goes first."""
        if self._name is None:
            # A rig that was left running on purpose has a description and nobody's lock: it is not ours to take.
            self._lock = lock_free_name(AUTOMATIC_NAME, wanted=lambda folder: not (folder / "keep").exists())
            self.layout = dataclasses.replace(self.layout, name=self._lock.name)
            self._hosts = Hosts(self.layout)
        else:
            self._lock = RigLock(self._name)
        try:
            if self.settings.fs:
                emulated_fs.require()
            if self.settings.cgroups:
                cgroups.require()
            self._remove_everything()
            files.make_folders(self.layout)
            with ThreadPoolExecutor(2) as pool:
                environment = pool.submit(self._make_python) if self._wants_python else None
                self._hosts.make_switch()
                database = pool.submit(services.install_database, self._hosts) if self.settings.accounting else None
                self.environment = environment.result() if environment else None
                mounts = self.environment.mounts if self.environment else {}
                files.write_configuration(self.layout, self.settings, mounts=mounts)
                self._describe()
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

    def _make_python(self) -> PythonEnvironment:
        if self.settings.release:
            return environment_of_root(self.layout.python, debian_root.debian_root(self.settings.release))
        return python_environment(self.layout.python)

    def stop(self) -> None:
        """End every process and remove every namespace, mount and file of the rig that this object started.

        Twice is fine, as is a rig that was never started. A rig that was detached is not ours any more: see `remove`.
        """
        if self._lock is not None:
            self._remove_everything()
            self._release()

    def detach(self) -> None:
        """Let the rig outlive this process: `attach` finds it again, `remove` ends it."""
        (self.layout.folder / "keep").touch()
        self._release()

    @classmethod
    def remove(cls, name: str) -> None:
        """End the rig of that name, or clean up what a killed process left of it; nothing there is fine."""
        cluster = cls(1, name=name)
        cluster._lock = RigLock(name)
        cluster.stop()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
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

    def _describe(self) -> None:
        environment = self.environment
        described = {
            "nodes": self.layout.nodes,
            "settings": dataclasses.asdict(self.settings),
            "python": str(environment.folder) if environment else None,
            "mounts": {str(where): str(what) for where, what in environment.mounts.items()} if environment else {},
        }
        self.layout.description.write_text(json.dumps(described, indent=1))

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

    def tell_client(self, host: str, command: str, **arguments: object) -> dict[str, Any]:
        """Give a host's emulated client a command: change, fail, heal, freeze, thaw, drop_caches, counters …"""
        return emulated_fs.tell_client(self.layout, host, command, **arguments)

    def change_caches(self, seconds: float) -> None:
        """How long the caches of every host that is on hold from now on; `SlurmCluster.heal` undoes it."""
        for host in (LOGIN, *self.node_names):
            if self._hosts.is_on(host):
                self.tell_client(host, "change", attributes=seconds, directories=seconds)

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
        """Start a command on a host as a user (alice, mallory, root) in a fresh login's environment plus `env`.

        The login host and the shared folder are the defaults; the environment's Python and the project's script are on
        its PATH; its ends are text pipes.
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
        timeout: float = 60 * CROWDED,
        check: bool = False,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; see `popen`. Its stdin is `input`, or empty."""
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

    def _root(self, *argv: str, check: bool = True, timeout: float = 60 * CROWDED) -> str:
        """Run a Slurm command as its administrator on the controller, and return its stdout."""
        return self.run(argv, user="root", node=CONTROLLER, check=check, timeout=timeout).stdout

    # What Slurm says ------------------------------------------------------------------------------------------------

    def node_states(self) -> dict[str, str]:
        lines = self._root("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return {words[0]: words[1] for line in lines if len(words := line.split()) == 2}

    def wait_nodes_ready(self, names: Sequence[str] | None = None) -> None:
        """Wait until Slurm would run jobs on the nodes (all by default)."""
        wanted = names or self.node_names

        def ready() -> bool:
            states = self.node_states()
            return all(states.get(name) in HEALTHY_STATES for name in wanted)

        wait_until(ready, timeout=30, what=f"{' '.join(wanted)} are ready", interval=0.05)

    def start_slurmctld(self) -> None:
        """Start the controller's daemon and wait until it listens; one that is running is fine."""
        services.start_slurmctld(self._hosts)

    def logs(self, *, limit: int = 6000) -> str:
        """The end of every daemon's log and, where the controller answers, what it says of nodes and jobs."""
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
