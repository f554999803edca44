"""The rig by hand.

python -m tests.rigs.network_mounts install
python -m tests.rigs.network_mounts up glusterfs
python -m tests.rigs.network_mounts down
python -m tests.rigs.network_mounts measure sshfs
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.rigs.network_mounts.keeper import keep
from tests.rigs.network_mounts.kinds import KINDS
from tests.rigs.network_mounts.leftovers import PREFIX, remove_leftovers, take_down, write_owner
from tests.rigs.network_mounts.measure import measure
from tests.rigs.network_mounts.prerequisites import install_prerequisites, missing_prerequisites
from tests.rigs.network_mounts.rig import ROOT, NetworkMounts, keeper_command

_HAND = f"{PREFIX}hand-"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rigs.network_mounts", description="Real network filesystems on this machine. Needs root."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install the Debian packages that are missing")
    up = commands.add_parser("up", help="bring one up; prints where its clients are mounted; stays until `down`")
    keeper = commands.add_parser("keep", help="(the rig's own first process)")
    measuring = commands.add_parser("measure", help="print how long changes take to show on another client")
    for command in (up, keeper, measuring):
        command.add_argument("kind", choices=sorted(KINDS))
        command.add_argument("--mounts", type=int, default=2)
    up.add_argument("folder", nargs="?", type=Path, help="an empty folder of yours in which to link to the mounts")
    keeper.add_argument("folder", type=Path)
    keeper.add_argument("--until-signal", action="store_true")
    commands.add_parser("down", help="take down what `up` brought up, and what killed tests left")
    options = parser.parse_args(argv)
    if options.command == "install":
        install_prerequisites()
        missing = [f"{kind}: {why}" for kind in KINDS if (why := missing_prerequisites(kind))]
        print("\n".join(missing) or "all of them can run", file=sys.stderr)
        return int(bool(missing))
    if options.command == "keep":
        keep(options.kind, options.folder, mounts=options.mounts, until_signal=options.until_signal)
        return 0
    remove_leftovers()
    if options.command == "measure":
        with NetworkMounts(options.kind) as filesystem:
            for what, (median, longest) in measure(filesystem.paths).items():
                print(f"{options.kind}, {what}: median {median:.4f} s, longest {longest:.4f} s")
        return 0
    if options.command == "down":
        for folder in Path(tempfile.gettempdir()).glob(f"{_HAND}*"):
            take_down(folder)
        return 0
    return _bring_up(options.kind, options.folder, mounts=options.mounts)


def _bring_up(kind: str, links: Path | None, *, mounts: int) -> int:
    if why := missing_prerequisites(kind):
        print(f"{kind} can't run: {why}", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix=_HAND))
    os.chmod(folder, 0o755)
    with open(folder / "keeper.log", "wb") as log:
        keeper = subprocess.Popen(
            keeper_command(kind, folder, mounts=mounts, until_signal=True),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    write_owner(folder, owner=None, keeper=keeper.pid)
    assert keeper.stdout is not None
    answer = json.loads(keeper.stdout.readline() or '{"error": "it ended; see its log"}')
    if "error" in answer:
        print(answer["error"], file=sys.stderr)
        return 1
    for path in answer["mounts"]:
        if links is not None:
            links.mkdir(parents=True, exist_ok=True)
            (links / Path(path).name).symlink_to(path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
