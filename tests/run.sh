#!/usr/bin/env bash
# Sets .venv up (once) and runs the project's checks and tests, or with --tier NAME some of them. Options go to
# `python -m tests.check`, which first says which Debian packages the tiers need, and installs them where it is root.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export HPC_ELASTIC_TORCH=${HPC_ELASTIC_TORCH:-torch==2.13.0}
# shellcheck source=docs/examples/setup-venv.sh
. docs/examples/setup-venv.sh

setup_venv dev,example
exec .venv/bin/python -m tests.check "$@"
