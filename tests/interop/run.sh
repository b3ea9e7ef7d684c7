#!/bin/sh
# Checks files against the Python package safetensors, both ways, and sealed records against the package cryptography
# (tests/interop/interop.py); and train_gpt's models against transformers and torch (tests/interop/huggingface.py). Each
# has a virtual environment of its own. That of torch takes 6 GB; INTEROP_PYTHON names a Python that has it already.
# Says what it skips where there is no Python, or the package index cannot be reached.
#   sh tests/interop/run.sh [seed]
cd "$(dirname "$0")/../.." || exit 1
mkdir -p build/interop
log=build/interop/log
skip() {
    echo "skipped: $1"
    return 1
}

# Makes a virtual environment with these packages, unless it is there.
environment() { # directory modules packages...
    python=$1/bin/python
    modules=$2
    "$python" -c "import $modules" 2>/dev/null && return 0
    command -v python3 >/dev/null 2>&1 || { skip "there is no python3"; return; }
    rm -rf "$1"
    python3 -m venv "$1" >$log 2>&1 || { skip "python3 makes no virtual environment"; return; }
    shift 2
    timeout 900 "$python" -m pip install -q "$@" >>$log 2>&1 ||
        skip "the package index cannot be reached, or has no $1 for this Python ($log)"
}

files() {
    [ -x build/safetensors ] && [ -x build/tests/test_chacha ] ||
        make build/safetensors build/tests/test_chacha >/dev/null || return 1
    SEALED_RECORDS=build/interop/sealed build/tests/test_chacha every_kernel_seals_to_the_same_bytes_at_every_length ||
        return 1
    environment build/interop/venv "safetensors, numpy, ml_dtypes, cryptography" 'safetensors>=0.8' 'numpy>=2' \
        ml_dtypes cryptography || return 0
    $python tests/interop/interop.py build/safetensors build/interop "$1"
}

models() {
    [ -x build/train_gpt ] && [ -x build/dtrun ] || make build/train_gpt build/dtrun >/dev/null || return 1
    python=${INTEROP_PYTHON:-}
    if [ -z "$python" ]; then
        [ "$(df -Pk build | awk 'NR == 2 { print $4 }')" -ge 12000000 ] ||
            { skip "12 GB of disk are not free for torch"; return 0; }
        environment build/interop/torch "torch, transformers, safetensors, numpy" torch transformers safetensors numpy ||
            return 0
    fi
    "$python" tests/interop/huggingface.py build/train_gpt build/dtrun build/interop
}

files "${1:-1}" >build/interop/files 2>&1
bad=$?
models >build/interop/models 2>&1 || bad=1
cat build/interop/files build/interop/models
awk -v bad=$bad '/^[0-9]+ passed, [0-9]+ failed$/ { good += $1; wrong += $3 } /^skipped: / { skipped++ }
    END { wrong += bad && !wrong; printf "%d passed, %d failed, %d skipped\n", good, wrong, skipped; exit wrong > 0 }' \
    build/interop/files build/interop/models
