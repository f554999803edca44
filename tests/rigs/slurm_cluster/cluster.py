"""A real Slurm of several nodes on one machine, as a context manager."""

from __future__ import annotations

import dataclasses
import pwd
import re
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from . import configuration, files, services
from .layout import LOGIN, RigError
from .processes import CROWDED, call, command_line, owner_of, wait_until
from .rig import HEALTHY_STATES, Rig

ENDED_STATES = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)
"""A job in one of these has ended (though a requeue may start it again)."""


class SlurmCluster(Rig):
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
        options: The other fields of `Settings`: cpus, memory_mb, gpus, cred_expire, max_time, cgroups, fs, extra_lines.

    Attributes:
        layout: Where its files lie.
        settings: What it was started with.
        environment: The Python environment for jobs, or ``None``.
    """

    _changed: Literal["nothing", "what it reads again", "what a start reads"] = "nothing"
    """Of slurm.conf, since the start or the last `heal`."""

    # Nodes -----------------------------------------------------------------------------------------------------------

    def kill_node(self, name: str, *, silent: bool = True) -> None:
        """Cut the node's power: all its processes are gone at once. A node that is off stays off.

        Args:
            name: Which.
            silent: Whether its peers hear nothing of it, as when power or network fail: their connections hang, and are
                reset when the node is back (Slurm 22.05: back before SlurmdTimeout, srun then ends the whole step).
                Else they see each connection closed.
        """
        self._hosts.power_off(self._node(name), silent=silent)

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
        self._hosts.set_link(name, up=False)

    def heal_link(self, name: str) -> None:
        self._hosts.set_link(name, up=True)

    @contextmanager
    def disturbed_link(self, name: str, *, mbit: int) -> Iterator[None]:
        """Meanwhile the host's link takes so many Mbit/s at most."""
        self._hosts.disturb_link(self._node(name), mbit=mbit)
        try:
            yield
        finally:
            self._hosts.clear_link(name)

    @contextmanager
    def delayed_link(self, name: str, *, seconds: float) -> Iterator[None]:
        """Meanwhile what the host sends and gets takes so long."""
        relay = self._hosts.delay_link(self._node(name), seconds)
        try:
            yield
        finally:
            self._hosts.undelay_link(name, relay)

    @contextmanager
    def small_filesystem(self, *, mib: int) -> Iterator[Path]:
        """Meanwhile the login host and all nodes that are on share one more filesystem, of so many MiB; its folder."""
        folder, image = self.shared / "small", self.layout.folder / "small.img"
        folder.mkdir(exist_ok=True)
        with open(image, "wb") as file:
            file.truncate(mib << 20)
        call(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)])
        hosts = [host for host in (LOGIN, *self.node_names) if self._hosts.is_on(host)]
        try:
            for host in hosts:  # the same loop device for all, and so one filesystem; it goes with its last mount
                call([*self._hosts.enter_argv(host), "mount", "-o", "loop", str(image), str(folder)])
            call([*self._hosts.enter_argv(LOGIN), "chmod", "1777", str(folder)])
            yield folder
        finally:
            for host in hosts:
                call([*self._hosts.enter_argv(host), "umount", "--lazy", str(folder)], check=False)
            image.unlink()

    def freeze_node(self, name: str) -> None:
        """Stop everything on the node at once, as a kernel that hangs: nothing runs, no packet is answered."""
        self._hosts.freeze(self._node(name))

    def thaw_node(self, name: str) -> None:
        """Let a frozen node go on where it was; one that is not frozen is fine."""
        self._hosts.thaw(self._node(name))

    def stop_slurmd(self, name: str) -> None:
        """Crash the node's slurmd alone: running steps go on, launches fail; `start_node` starts it again."""
        services.stop_slurmd(self._hosts, self._node(name))

    def stop_munged(self, name: str) -> None:
        """Kill the node's munge daemon alone: Slurm can't reach the node, which lives with all its files and peers."""
        self.kill_process(self._node(name), r"\Amunged ")

    def start_munged(self, name: str) -> None:
        """Start the munge daemon of a node that has none; one that runs is fine."""
        if not any(line.startswith("munged ") for _, line in self.node_pids(self._node(name))):
            self._hosts.start_daemon(name, configuration.munged_command(self.layout))

    def drain(self, name: str) -> None:
        self._root("scontrol", "update", f"nodename={self._node(name)}", "state=drain", "reason=drained by the rig")

    def undrain(self, name: str) -> None:
        """Let Slurm use the node again, whether it was drained or set down; one in use already is fine."""
        self._root("scontrol", "update", f"nodename={self._node(name)}", "state=resume", check=False)

    def node_state(self, name: str) -> str:
        """What Slurm calls the node's state, such as ``idle``, ``down*``, ``draining``."""
        return self.node_states().get(self._node(name), "unknown")

    def wait_node(self, name: str, states: Collection[str], *, timeout: float = 60) -> str:
        """Wait until the node is in one of `states`, a trailing ``*`` (does not answer) aside, and return that."""
        seen = ""

        def reached() -> bool:
            nonlocal seen
            seen = self.node_state(name)
            return seen.rstrip("*") in states

        wait_until(reached, timeout=timeout, what=f"node {name} is {' or '.join(states)}", interval=0.2)
        return seen

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
        """Send a signal to one process, or to all whose command line matches `target`. Returns their pids outside."""
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
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + CROWDED * timeout
        while (state := self.job_state(job_id)) not in wanted:
            if time.monotonic() > deadline:
                raise RigError(
                    f"job {job_id} was not {'/'.join(sorted(wanted))} in {CROWDED * timeout:g} s: "
                    f"{self.job_info(job_id)}"
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
        def gone() -> bool:
            jobs = self._root("squeue", "--noheader", "--format=%A").split()
            if jobs:
                self._root("scancel", "--full", "--signal=KILL", *jobs, check=False)
                self._root("scancel", *jobs, check=False)
            return not jobs

        wait_until(gone, timeout=timeout, what="all jobs are gone", interval=0.3)

    # Services --------------------------------------------------------------------------------------------------------

    def stop_slurmctld(self) -> None:
        """Stop the controller's daemon; one that is not running is fine.

        It saves its state. For a crash, which loses its last seconds: ``kill_process("ctl", "slurmctld")``.
        """
        services.stop_slurmctld(self._hosts)

    def reconfigure(
        self, changes: Mapping[str, str | int | None], *, extra_lines: Sequence[str] = (), restart: bool = False
    ) -> None:
        """Make the living cluster another site's, until `heal` makes it its own again. Jobs go on.

        Args:
            changes: Lines of slurm.conf beside those that it was started with; ``None`` leaves one out.
            extra_lines: Further whole lines, such as partitions.
            restart: Whether slurmctld is started anew, as some settings need (accounting, plugins); else it reads them
                again (``scontrol reconfigure``).
        """
        own = self.settings
        there = dataclasses.replace(
            own, slurm_conf={**own.slurm_conf, **changes}, extra_lines=(*own.extra_lines, *extra_lines)
        )
        if restart or self._changed == "nothing":
            self._changed = "what a start reads" if restart else "what it reads again"
        if restart:
            self.stop_slurmctld()
        files.write_slurm_conf(self.layout, there)
        if restart:
            self.start_slurmctld()
        else:
            self._root("scontrol", "reconfigure")

    def refuse_requeue(self) -> None:
        """Let no user's ``scontrol requeue`` through, as sites do that keep it for operators; `heal` undoes it.

        Slurm has no setting for that: a program of that name comes first on everybody's PATH.
        """
        program = self._refusing_scontrol()
        program.write_text(
            '#!/bin/sh\nif [ "$1" = requeue ]; then echo "Access/permission denied for job $2" >&2; exit 1; fi\n'
            'exec /usr/bin/scontrol "$@"\n'
        )
        program.chmod(0o755)

    def _refusing_scontrol(self) -> Path:
        if self.environment is None:
            raise RigError("a rig without a Python environment has no folder for programs of its own")
        return self.environment.bin / "scontrol"

    def heal(self) -> None:
        """Bring the rig back to how it was after its start, but for what lies in `shared` and the homes."""
        if self.environment is not None:
            self._refusing_scontrol().unlink(missing_ok=True)
        for name in self.node_names:
            if self._hosts.is_on(name):
                self.start_munged(name)
        if self._changed != "nothing":
            files.write_slurm_conf(self.layout, self.settings)
        if self._changed == "what a start reads":
            self.stop_slurmctld()
        self.start_slurmctld()
        if self._changed == "what it reads again":
            self._root("scontrol", "reconfigure")
        self._changed = "nothing"
        for name in self.node_names:
            if self._hosts.is_on(name):
                self.thaw_node(name)  # and its link is healed
            self.start_node(name, wait=False)
        if self.settings.fs:
            for host in (LOGIN, *self.node_names):
                for command in ("heal", "thaw"):
                    self.tell_client(host, command)
                self.tell_client(host, "change", **dataclasses.asdict(self.settings.fs))
        try:
            self.cancel_all_jobs(timeout=3)
        except RigError:
            # A job whose end was lost with a node's power stays COMPLETING there for minutes: slurmctld asks a node
            # that is back only now and then. One that is down it does not ask.
            for name, state in self.node_states().items():
                if state.rstrip("*") not in {"idle", "down"}:
                    self._root("scontrol", "update", f"nodename={name}", "state=down", "reason=healed", check=False)
            self.cancel_all_jobs(timeout=60)
        for name, state in self.node_states().items():
            if state.rstrip("*") not in HEALTHY_STATES:
                self.undrain(name)
        self.wait_nodes_ready()
