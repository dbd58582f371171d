#!/usr/bin/env bash
# Make the virtual environment .venv of this checkout, once per set of requirements.
#
#   scripts/make_venv.sh [ci|gpu|""] [PYTHON]
#
# Without a set: the one that .venv was made with, else ci.
# PYTHON: the interpreter to use; without it the first of python3, python3.12, python3.11 that is 3.11 or 3.12.
# Writes only to .venv (and pip's own cache). A stamp in .venv keeps a second call from doing anything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.installed
made_with=$(cut -d' ' -f1 "$stamp" 2>/dev/null || true)
extra=${1:-${made_with:-ci}}
requested=${2:-}
requirements=requirements-$extra.txt
if [ ! -f "$requirements" ]; then
    echo "error: EXTRA=$extra is unknown: write EXTRA=ci or EXTRA=gpu" >&2
    exit 2
fi

key=$(cat "$requirements" pyproject.toml scripts/make_venv.sh | cksum)
if [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$extra $key $PWD" ]; then
    exit 0
fi

is_supported() { # INTERPRETER CONDITION
    "$1" -c "import sys; sys.exit(not ($2))" >/dev/null 2>&1
}

python=""
if [ -n "$requested" ]; then
    is_supported "$requested" "sys.version_info >= (3, 11)" && python=$requested
else
    for candidate in python3 python3.12 python3.11; do
        if is_supported "$candidate" "(3, 11) <= sys.version_info < (3, 13)"; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    found=$("${requested:-python3}" --version 2>&1 || true)
    echo "error: Python 3.11 or 3.12 is needed, found: $found" >&2
    echo "       install one of them, or name it: make venv PYTHON=/path/to/python3.11" >&2
    exit 2
fi
if ! "$python" -c "import ensurepip, venv" >/dev/null 2>&1; then
    echo "error: $python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2
    exit 2
fi

echo "making .venv with $("$python" --version) from $requirements (a few minutes the first time)"
rm -f "$stamp"
version='"%d.%d" % sys.version_info[:2]'
if ! is_supported .venv/bin/python "$version == '$("$python" -c "import sys; print($version)")'"; then
    rm -rf .venv
fi
"$python" -m venv .venv
.venv/bin/python -m pip install --quiet --progress-bar off -r "$requirements"
.venv/bin/python -m pip install --quiet --progress-bar off --no-deps --editable .
echo "$extra $key $PWD" >"$stamp"
