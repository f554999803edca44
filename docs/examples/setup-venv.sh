# shellcheck shell=bash
# Sourced by docs/examples/quickstart.sh and tests/run.sh: makes .venv in the current folder (the repository's root) and
# installs this package into it, editable, with torch. Nothing outside the folder is touched. Does nothing when that was
# done already.
#
#   PYTHON                the interpreter to build the environment from (default: the first of those in PATH that is 3.10
#                         or later, one that has a torch before one that has none)
#   HPC_ELASTIC_TORCH     what to install as torch, for example 'torch==2.9.1' (default: the torch that the interpreter
#                         has, where it is 2.4 or later; else torch==2.13.0)

# shellcheck source=docs/examples/debian-python.sh
. docs/examples/debian-python.sh

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# has_torch PYTHON: 2.4 or later, and it can be imported.
has_torch() {
    "$1" -c 'import re, sys, torch; sys.exit([int(n) for n in re.findall("[0-9]+", torch.__version__)[:2]] < [2, 4])' \
        >/dev/null 2>&1
}

# Prints the first interpreter that is new enough; one whose torch can be used comes before those without.
find_python() {
    local candidate found='' candidates=(python python3 python3.1{4..0} "$PWD/.python/usr/bin/python3")
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        new_enough "$candidate" || continue
        candidate=$(command -v "$candidate")
        [ -n "$found" ] || found=$candidate
        [ -n "${HPC_ELASTIC_TORCH:-}" ] && break
        if has_torch "$candidate"; then
            found=$candidate
            break
        fi
    done
    [ -n "$found" ] && printf '%s\n' "$found"
}

# make_venv PYTHON: .venv with a pip in it. Debian keeps ensurepip in a package of its own.
make_venv() {
    local python=$1
    if "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        "$python" -m venv --clear .venv
    elif "$python" -c 'import virtualenv' >/dev/null 2>&1; then
        "$python" -m virtualenv -q --clear .venv
    elif "$python" -c 'import pip, venv' >/dev/null 2>&1; then
        "$python" -m venv --clear --without-pip .venv &&
            "$python" -m pip -q --python .venv/bin/python install pip
    elif "$python" -c 'import venv' >/dev/null 2>&1 && debian_pip "$python"; then
        :
    else
        die "$python cannot make virtual environments; install python3-venv (Debian: apt-get install python3-venv)" \
            "or set PYTHON to an interpreter that can"
    fi || die "$python could not make .venv (see above)"
}

# share_torch PYTHON: has .venv see the packages of PYTHON's environment, behind its own. As --system-site-packages, which
# in an active virtual environment would show those of the Python below it.
share_torch() {
    local folder
    folder=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
    "$1" -c '
import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")' >"$folder/zz_shared_with_hpc_elastic.pth"
    has_torch .venv/bin/python || rm "$folder/zz_shared_with_hpc_elastic.pth"
}

# setup_venv EXTRAS: as in pip install '.[EXTRAS]', for example dev,example.
setup_venv() {
    local extras=$1 python stamp key wanted torch=() quiet=()
    stamp=".venv/.ready-$extras"
    key="$PWD ${HPC_ELASTIC_TORCH:-} $(cat pyproject.toml docs/examples/setup-venv.sh | cksum)"
    if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
        return 0
    fi
    if ! new_enough .venv/bin/python; then
        if ! python=$(find_python); then
            [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is no Python 3.10 or later that can be run"
            if ! debian_python || ! python=$(find_python); then
                die "no Python 3.10 or later found; install one, or set PYTHON to it"
            fi
        fi
        say "making $PWD/.venv with $("$python" --version 2>&1) ($python)"
        make_venv "$python"
        [ -n "${HPC_ELASTIC_TORCH:-}" ] || ! has_torch "$python" || share_torch "$python"
    fi
    .venv/bin/python -m pip --version >/dev/null 2>&1 || die "$PWD/.venv has no pip; remove it and start again"
    if has_torch .venv/bin/python; then
        say "using $(.venv/bin/python -c 'import torch; print("torch", torch.__version__, "of", torch.__file__)')"
    else
        torch=("${HPC_ELASTIC_TORCH:-torch==2.13.0}")
    fi
    wanted=(-e ".[$extras]" ${torch[@]+"${torch[@]}"})
    .venv/bin/python docs/examples/download_size.py "${wanted[@]}" || quiet=(-q)
    .venv/bin/python -m pip install ${quiet[@]+"${quiet[@]}"} "${wanted[@]}" ||
        die "pip could not install ${wanted[*]} (see above); where it was torch, install one into .venv yourself and start again"
    has_torch .venv/bin/python || die "$PWD/.venv has no torch 2.4 or later that can be imported; remove it and start again"
    say "$PWD/.venv is ready: $(du -sh .venv | cut -f 1), and nothing else was installed; to undo it, remove this folder"
    printf '%s\n' "$key" >"$stamp"
}
