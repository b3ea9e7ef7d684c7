#!/bin/sh
# Checks files against the Python package safetensors, both ways, and sealed records against the package cryptography
# (tests/interop/interop.py); and train_gpt's models against transformers and torch (tests/interop/huggingface.py). Each
# has a virtual environment of its own. That of torch takes 6 GB; INTEROP_PYTHON names a Python that has it already.
# Says what it skips where there is no Python, or the package index cannot be reached. SAMPLE=N leaves the models out
# unless 3 divides N.
#   [SAMPLE=N] sh tests/interop/run.sh [seed]
cd "$(dirname "$0")/../.." || exit 1
mkdir -p build/interop
skip() {
    echo "skipped: $1"
    return 1
}

environment() { # group of tests/support/install.sh; leaves its Python in $python
    python=$(sh tests/support/install.sh in $1)/bin/python
    sh tests/support/install.sh $1 || skip "there is no python3, or the package index does not give what $1 take"
}

files() {
    [ -x build/safetensors ] && [ -x build/tests/test_chacha ] ||
        make build/safetensors build/tests/test_chacha >/dev/null || return 1
    SEALED_RECORDS=build/interop/sealed build/tests/test_chacha every_kernel_seals_to_the_same_bytes_at_every_length ||
        return 1
    environment files || return 0
    $python tests/interop/interop.py build/safetensors build/interop "$1"
}

models() {
    [ -x build/train_gpt ] && [ -x build/dtrun ] || make build/train_gpt build/dtrun >/dev/null || return 1
    python=${INTEROP_PYTHON:-}
    if [ -z "$python" ]; then
        home=$(sh tests/support/install.sh in models)
        [ -e "$home/has" ] || [ "$(df -Pk "${home%/*}" | awk 'NR == 2 { print $4 }')" -ge 12000000 ] ||
            { skip "12 GB of disk are not free for torch"; return 0; }
        environment models || return 0
    fi
    "$python" tests/interop/huggingface.py build/train_gpt build/dtrun build/interop
}

files "${1:-1}" >build/interop/files 2>&1
bad=$?
if [ $((${SAMPLE:-0} % 3)) -eq 0 ]; then
    models >build/interop/models 2>&1 || bad=1
else
    echo "left out: models" >build/interop/models
fi
cat build/interop/files build/interop/models
awk -v bad=$bad '/^[0-9]+ passed, [0-9]+ failed$/ { good += $1; wrong += $3 } /^skipped: / { skipped++ }
    END { wrong += bad && !wrong; printf "%d passed, %d failed, %d skipped\n", good, wrong, skipped; exit wrong > 0 }' \
    build/interop/files build/interop/models
