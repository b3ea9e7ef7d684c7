#!/bin/sh
# Checks files against the Python package safetensors, both ways (tests/interop/interop.py), in a virtual environment of
# its own. Says that it skips where there is no Python, or the package index cannot be reached.
#   sh tests/interop/run.sh [seed]
cd "$(dirname "$0")/../.." || exit 1
venv=build/interop/venv
skip() {
    echo "skipped: $1"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
}
[ -x build/safetensors ] || make build/safetensors >/dev/null || exit 1
mkdir -p build/interop
if ! $venv/bin/python -c 'import safetensors, numpy, ml_dtypes' 2>/dev/null; then
    command -v python3 >/dev/null 2>&1 || skip "there is no python3"
    rm -rf $venv
    python3 -m venv $venv >build/interop/log 2>&1 || skip "python3 makes no virtual environment"
    timeout 240 $venv/bin/pip install -q 'safetensors>=0.8' 'numpy>=2' ml_dtypes >>build/interop/log 2>&1 ||
        skip "the package index cannot be reached, or has no safetensors 0.8 for this Python (build/interop/log)"
fi
exec $venv/bin/python tests/interop/interop.py build/safetensors build/interop "${1:-1}"
