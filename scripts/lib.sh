# What the scripts share: finding an interpreter and making an environment. Sourced, not run.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
trap 'echo; exit 130' INT
supported_pythons="3.13 3.12 3.11"

step() { printf '\n== %s\n' "$*"; }

fail() {
    echo "scripts/$(basename "$0"): $*" >&2
    exit 2
}

is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

minor_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

# All interpreters of version $1: on the PATH, then those that pyenv keeps.
candidates() {
    command -v "python$1" || true
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python 2>/dev/null || true
}

# Sets $python: the one that $PYTHON names, else python3, else the newest supported one there is.
find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        command -v "$PYTHON" >/dev/null || fail "there is no $PYTHON; set PYTHON to a Python 3.11 or newer"
        is_supported "$PYTHON" || fail "$PYTHON is Python $(minor_version "$PYTHON"); 3.11 or newer is needed"
        python=$PYTHON
        return
    fi
    for candidate in python3 $(for version in $supported_pythons; do candidates "$version"; done); do
        if is_supported "$candidate"; then
            python=$candidate
            return
        fi
    done
    fail "there is no Python 3.11 or newer; install one, or name it: PYTHON=/path/to/python3 scripts/$(basename "$0")"
}

# One interpreter for each supported version other than that of $1.
other_pythons() {
    local version candidate
    for version in $supported_pythons; do
        [[ $version == "$(minor_version "$1")" ]] && continue
        for candidate in $(candidates "$version"); do
            is_supported "$candidate" && echo "$candidate" && break
        done
    done
}

# make_environment PYTHON DIRECTORY EXTRAS [REQUIREMENT…]: installs the wheel of this checkout, not its source
# tree, with its extras. As long as nothing changed, nothing is installed again and no network is needed.
make_environment() {
    local python=$1 venv=$2 extras=$3 interpreter contents
    shift 3
    # An environment holds absolute paths: it is made anew for another Python or when the checkout was moved.
    interpreter="$(command -v "$python") $("$python" --version) $root"
    if [[ ! -f $venv/interpreter || "$(<"$venv/interpreter")" != "$interpreter" ]]; then
        [[ -w $(dirname "$venv") && ( ! -e $venv || -w $venv ) ]] ||
            fail "$venv cannot be made: there is no permission to write in the checkout, or to the old one"
        echo "making an environment in $(basename "$venv") ..."
        rm -rf "$venv"
        "$python" -m venv "$venv" ||
            fail "$python cannot make an environment (Debian and Ubuntu: apt install python3-venv)"
        echo "$interpreter" >"$venv/interpreter"
    fi
    contents="$extras $* $(cd "$root" && find pyproject.toml gym_capture_redis -type f ! -name '*.pyc' -print0 |
        sort -z | xargs -0 cksum)"
    if [[ ! -f $venv/contents || "$(<"$venv/contents")" != "$contents" ]]; then
        rm -f "$venv/contents"
        echo "installing gym-capture-redis[$extras] from this checkout in $(basename "$venv") ..."
        # Python compiles what is imported; compiling everything takes longer than unpacking it.
        "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-compile --upgrade \
            "$root[$extras]" "$@" ||
            fail "the installation failed; what pip said is above"
        echo "$contents" >"$venv/contents"
    fi
}
