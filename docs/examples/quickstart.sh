#!/usr/bin/env bash
# The first run: installs into .venv (once; it says how much it downloads), then trains a small network on 4 local
# "nodes" and has one worker killed on the way, so that you see what happens. Needs no Slurm. Takes a minute or two after
# the installation.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
# shellcheck source=docs/examples/setup-venv.sh
. docs/examples/setup-venv.sh

setup_venv example

work=$(mktemp -d "${TMPDIR:-/tmp}/hpc-elastic-quickstart.XXXXXX") || exit 1
command=(.venv/bin/hpc-elastic run --cluster local --nodes 4 --nproc-per-node 1 --runs-dir "$work/runs"
    docs/examples/train_digits.py --epochs 10 --checkpoint "$work/digits" --kill-rank 2 --kill-epoch 4)

cat <<TEXT

Training on 4 local nodes with 1 worker each, in $work. In epoch 4, rank 2 kills itself; watch the others go on with a new one.

    ${command[*]}

TEXT
"${command[@]}"
code=$?
cat <<TEXT

The run ended with exit code $code. Everything about it is in $work ($(du -sh "$work" | cut -f 1)); read its report again with:

    .venv/bin/hpc-elastic report $work/runs/*
TEXT
exit "$code"
