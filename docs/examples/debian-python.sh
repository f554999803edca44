# shellcheck shell=bash
# Sourced by setup-venv.sh, for somebody who may not install packages: Debian's Python, or its pip, from where apt-get gets
# its packages, unpacked into .python in the current folder. Nothing outside it is touched; to undo it, remove it.

# debian_unpack PACKAGE...: with what they depend on and this system lacks, into .python/usr.
debian_unpack() {
    command -v apt-get >/dev/null 2>&1 && command -v dpkg-deb >/dev/null 2>&1 || return 1
    local into=$PWD/.python apt log package
    mkdir -p "$into/apt/lists/partial" "$into/apt/archives/partial" || return 1
    log=$into/apt/log
    # The system's sources and list of what is installed; folders, lists and locks of our own.
    apt=(apt-get -qq -o "Dir::State=$into/apt" -o "Dir::State::lists=$into/apt/lists" -o "Dir::Cache=$into/apt"
        -o Dir::State::status=/var/lib/dpkg/status -o Debug::NoLocking=1 -o APT::Sandbox::User=)
    if ! "${apt[@]}" update </dev/null >"$log" 2>&1 ||
        ! "${apt[@]}" install -y --download-only --no-install-recommends "$@" </dev/null >>"$log" 2>&1; then
        tail -n 3 "$log" >&2
        rm -rf "$into/apt"
        return 1
    fi
    for package in "$into"/apt/archives/*.deb; do
        dpkg-deb -x "$package" "$into" || return 1
    done
    rm -rf "$into/apt"
}

# debian_python: .python/usr/bin/python3, which finds the libraries that came with it beside it.
debian_python() {
    local machine python
    say "no Python here, and no right to install one: unpacking Debian's into $PWD/.python"
    debian_unpack python3 python3-pip-whl patchelf || return 1
    machine=$(uname -m)-linux-gnu
    for python in .python/usr/bin/python3.*[0-9]; do
        .python/usr/bin/patchelf --force-rpath \
            --set-rpath "\$ORIGIN/../lib/$machine:\$ORIGIN/../../lib/$machine" "$python" || return 1
    done
    .python/usr/bin/python3 -c 'import ctypes, sqlite3, ssl, venv, zlib' ||
        { say "Debian's Python does not run from $PWD/.python" && return 1; }
}

# debian_pip PYTHON: a pip in .venv, which has none, from Debian's package for that.
debian_pip() {
    local wheel
    compgen -G '.python/usr/share/python-wheels/pip-*.whl' >/dev/null || {
        say "$1 has no pip, and no right to install it: unpacking Debian's into $PWD/.python"
        debian_unpack python3-pip-whl || return 1
    }
    wheel=$(compgen -G '.python/usr/share/python-wheels/pip-*.whl' | head -n 1)
    "$1" -m venv --clear --without-pip .venv && PYTHONPATH=$PWD/$wheel .venv/bin/python -m pip -q install pip
}
