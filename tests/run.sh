#!/usr/bin/env bash
# Sets everything up (once) and runs the project's checks and tests. Options go to `python -m tests.check`.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=docs/examples/setup-venv.sh
. docs/examples/setup-venv.sh

setup_venv dev,example

command -v shellcheck >/dev/null 2>&1 || apt_install shellcheck || say "skipped: shellcheck is missing and could not be installed"

command -v fusermount3 >/dev/null 2>&1 || apt_install fuse3 || say "skipped: the tests on emulated NFS, which need root and Debian's fuse3"

command -v ch-run >/dev/null 2>&1 || apt_install charliecloud || say "skipped: the tests in containers, which need charliecloud"

command -v podman >/dev/null 2>&1 && command -v runc >/dev/null 2>&1 || apt_install podman runc || say "skipped: the tests in podman's containers"

if [ "$(id -u)" != 0 ]; then
    say "skipped: the real-Slurm tests and those on real network filesystems, which need root for namespaces and mounts"
else
    log=$(mktemp)
    if ! .venv/bin/python -m tests.rigs.network_mounts install </dev/null >"$log" 2>&1; then
        say "skipped: tests on real network filesystems, which can't run here: $(tail -n 1 "$log")"
    fi
    if ! .venv/bin/python -m tests.rigs.slurm_cluster install </dev/null >"$log" 2>&1; then
        say "skipped: the real-Slurm tests, which can't run here: $(tail -n 1 "$log")"
    fi
    if ! .venv/bin/python -m tests.browser.chromium install </dev/null >"$log" 2>&1; then
        say "skipped: tests of the HTML report in a browser, which can't run here: $(tail -n 1 "$log")"
    fi
    rm -f "$log"
fi

exec .venv/bin/python -m tests.check "$@"
