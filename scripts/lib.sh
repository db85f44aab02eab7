# What the scripts share: finding an interpreter and making an environment. Sourced, not run.

supported_pythons="3.13 3.12 3.11"

step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' 2>/dev/null; }

# All interpreters of version $1: on the PATH, then those that pyenv keeps.
candidates() {
    command -v "python$1" || true
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python 2>/dev/null || true
}

find_python() {
    local version candidate
    if [ -n "${PYTHON:-}" ]; then
        is_supported "$PYTHON" && { echo "$PYTHON"; return; }
        echo "PYTHON=$PYTHON is not a Python 3.11 or newer" >&2
        return 1
    fi
    for candidate in python3 $(for version in $supported_pythons; do candidates "$version"; done); do
        is_supported "$candidate" && { echo "$candidate"; return; }
    done
    echo "no Python 3.11 or newer was found; install one, or name it with PYTHON=/path/to/python3" >&2
    return 1
}

# One interpreter for each supported version other than that of $1.
other_pythons() {
    local version candidate used
    used=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    for version in $supported_pythons; do
        [ "$version" = "$used" ] && continue
        for candidate in $(candidates "$version"); do
            is_supported "$candidate" && { echo "$candidate"; break; }
        done
    done
}

# make_environment PYTHON DIRECTORY REQUIREMENT…: the wheel of this checkout, not its source tree.
make_environment() {
    local python=$1 directory=$2
    shift 2
    [ -x "$directory/bin/python" ] || "$python" -m venv "$directory"
    "$directory/bin/python" -m pip install -q --disable-pip-version-check "$@"
}
