# shellcheck shell=bash
# Sourced by docs/examples/quickstart.sh and tests/run.sh: makes .venv in the current folder (the repository's root) and
# installs this package into it, editable, with torch. Does nothing when that was done already.
#
#   PYTHON                the interpreter to build the environment from (default: python3, or the newest other one that is 3.10 or later)
#   HPC_ELASTIC_TORCH     what to install as torch (default: torch==2.13.0), unless .venv has one that imports

# shellcheck source=docs/examples/debian-python.sh
. docs/examples/debian-python.sh

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# apt_install PACKAGE...: as root on Debian and its kin; fails quietly anywhere else.
apt_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    say "apt-get install $*"
    local log
    log=$(mktemp)
    if (export DEBIAN_FRONTEND=noninteractive && apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@") \
        </dev/null >"$log" 2>&1; then
        rm -f "$log"
    else
        tail -n 5 "$log" >&2
        rm -f "$log"
        return 1
    fi
}

# Prints the first interpreter that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 "$PWD/.python/usr/bin/python3"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# make_venv PYTHON: .venv with a pip in it. Debian keeps ensurepip in a package of its own.
make_venv() {
    local python=$1
    if "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        { apt_install python3 python3-venv && "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; }; then
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

# setup_venv EXTRAS: as in pip install '.[EXTRAS]', for example dev,example.
setup_venv() {
    local extras=$1 torch=${HPC_ELASTIC_TORCH:-torch==2.13.0} python stamp key
    stamp=".venv/.ready-$extras"
    key="$PWD $torch $(cat pyproject.toml docs/examples/setup-venv.sh | cksum)"
    if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
        return 0
    fi
    if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
        if [ -n "${PYTHON:-}" ] && [ "$(find_python)" != "$(command -v "$PYTHON")" ]; then
            die "PYTHON=$PYTHON is no Python 3.10 or later that can be run"
        fi
        if ! python=$(find_python) && ! { { apt_install python3 python3-venv ca-certificates || debian_python; } &&
            python=$(find_python); }; then
            die "no Python 3.10 or later found; install one, or set PYTHON to it"
        fi
        say "making .venv with $("$python" --version 2>&1)"
        make_venv "$python"
    fi
    .venv/bin/python -m pip --version >/dev/null 2>&1 || die "$PWD/.venv has no pip; remove it and start again"
    say "installing hpc_elastic with [$extras] into .venv"
    .venv/bin/python -m pip install -q -e ".[$extras]" || die "pip could not install hpc_elastic[$extras] (see above)"
    if ! .venv/bin/python -c 'import torch' >/dev/null 2>&1; then
        say "installing $torch into .venv"
        .venv/bin/python -m pip install -q "$torch" ||
            die "pip could not install $torch (see above); install a torch into .venv yourself and start again"
    fi
    printf '%s\n' "$key" >"$stamp"
}
