#!/usr/bin/env bash
# Sets everything up (once) and runs the project's checks and tests. Options go to `python -m tests.check`.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=docs/examples/setup-venv.sh
. docs/examples/setup-venv.sh

setup_venv dev,example

command -v shellcheck >/dev/null 2>&1 || apt_install shellcheck || say "skipped: shellcheck is missing and could not be installed"

if [ "$(id -u)" != 0 ]; then
    say "skipped: the real-Slurm tests, which need root to start a Slurm in network namespaces"
elif ! .venv/bin/python -m tests.rigs.slurm_cluster install </dev/null; then
    say "skipped: the real-Slurm tests, as Slurm's packages could not be installed (see above)"
fi

exec .venv/bin/python -m tests.check "$@"
