#!/bin/sh
# Puts an nvcc of CUDA 12 into a directory: the compiler out of Debian's packages, unpacked and not installed, its headers
# out of PyPI's. It compiles; there is no runtime to link with. Says on stderr what could not be had, and ends with 1.
#   sh tests/support/nvcc12.sh build/cuda-12
set -eu
top=$1
nvcc=$top/bin/nvcc
[ ! -x "$nvcc" ] || exit 0
fail() {
    echo "no nvcc of CUDA 12: $1" >&2
    exit 1
}
[ "$(uname -m)" = x86_64 ] || fail "only for x86_64"
command -v apt-get >/dev/null 2>&1 || fail "no apt-get here"
work=$(mktemp -d "${TMPDIR:-/tmp}/nvcc12.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$work/lists/partial" "$work/sources" "$work/debs" "$work/wheels" "$work/headers"
chmod -R a+rx "$work"
cat >"$work/sources/cuda.sources" <<END
Types: deb
URIs: $(sed -n 's|^URIs: *\(.*/debian\)/*$|\1|p; s|^deb \(\[[^]]*\] \)*\([^ ]*/debian\)/* .*|\2|p' \
    /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -1)
Suites: trixie
Components: non-free
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
apt="apt-get -q -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=$work/sources -o Dir::State::Lists=$work/lists"
$apt update >"$work/log" 2>&1 || fail "$(tail -1 "$work/log")"
(cd "$work/debs" && $apt download nvidia-cuda-toolkit >"$work/log" 2>&1) || fail "$(tail -1 "$work/log")"
dpkg -x "$work"/debs/*.deb "$work/root"
version=$(ls "$work/debs" | sed 's|^[^_]*_\([0-9]*\.[0-9]*\)\..*|\1|')
python3 -m pip download -q --no-deps -d "$work/wheels" "nvidia-cuda-runtime-cu12==$version.*" "nvidia-cuda-nvcc-cu12==$version.*" \
    >"$work/log" 2>&1 || fail "$(tail -1 "$work/log")"
for wheel in "$work"/wheels/*.whl; do
    python3 -m zipfile -e "$wheel" "$work/headers"
done
private=$work/root/usr/lib/nvidia-cuda-toolkit
rm -rf "$top"
mkdir -p "$top/bin" "$top/nvvm/bin" "$top/include"
for tool in ptxas fatbinary nvlink cudafe++ bin2c cuobjdump nvdisasm; do
    cp -L "$work/root/usr/bin/$tool" "$top/bin/"
done
cp -r "$private/bin/crt" "$top/bin/"
cp "$private/bin/cicc" "$top/nvvm/bin/"
cp -r "$private/libdevice" "$top/nvvm/"
cp -r "$work"/headers/nvidia/cuda_runtime/include/. "$work"/headers/nvidia/cuda_nvcc/include/. "$top/include/"
cat >"$top/bin/nvcc.profile" <<'END'
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
END
cp "$private/bin/nvcc" "$nvcc" # last: where it is, all is
