#!/bin/sh
# Brings what checks need and this machine lacks: commands by apt-get, Python's packages into virtual environments. What is
# here costs no question. Several may run at once. Prints "missing: NAME" for each that cannot be had, and ends with 1; the
# caller skips what needs it, and says so. The first argument "in" prints the directory of an environment instead.
#   sh tests/support/install.sh clang network cross ...
#   sh tests/support/install.sh in NAME
# Environments stand outside the tree, so that a fresh clone finds them: in DTRAIN_CHECKS, or ~/.cache/dtrain-checks.
cd "$(dirname "$0")/../.." || exit 1
checks=${DTRAIN_CHECKS:-${XDG_CACHE_HOME:-$HOME/.cache}/dtrain-checks}
PATH=$PATH:/usr/lib/wine # Debian's place of wine64
mkdir -p "$checks"

locked() { # name command...: no two processes do it at once
    name=$1
    shift
    (
        ! command -v flock >/dev/null 2>&1 || flock 9
        "$@"
    ) 9>"$checks/$name.lock" >"$checks/$name.log" 2>&1
}

present() {
    for command; do
        command -v "$command" >/dev/null 2>&1 || return 1
    done
}

bring() { # commands, packages...
    # shellcheck disable=SC2086
    present $1 && return
    shift
    apt-get install -y --no-install-recommends "$@" || { apt-get update && apt-get install -y --no-install-recommends "$@"; }
}
system() { # commands, packages...
    # shellcheck disable=SC2086
    present $1 || { present apt-get && locked system bring "$@" && present $1; }
}

make_environment() { # name packages...
    home=$checks/$1
    shift
    [ "$(cat "$home/has" 2>/dev/null)" != "$*" ] || return 0
    rm -rf "$home"
    python3 -m venv "$home" && timeout 2400 "$home/bin/python" -m pip install -q "$@" && echo "$*" >"$home/has"
}
environment() { # name packages...
    [ "$(cat "$checks/$1/has" 2>/dev/null)" = "$(shift && echo "$*")" ] && "$checks/$1/bin/python" -c '' 2>/dev/null ||
        { present python3 && locked "$1" make_environment "$@"; }
}

fuzzer() { # libFuzzer of this clang
    system clang clang || return
    echo 'int LLVMFuzzerTestOneInput(const char *at, long n); int LLVMFuzzerTestOneInput(const char *at, long n) { return at != 0 && n < 0; }' |
        clang -x c -fsanitize=fuzzer,address - -o "$checks/fuzzer" 2>"$checks/fuzzer.log" && return
    system no-such-command "libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev"
    [ -e "$(clang -print-resource-dir)/lib/linux/libclang_rt.fuzzer-$(uname -m).a" ]
}

group() {
    case $1 in
    python) system python3 python3 python3-venv ;;
    g++) system g++ g++ ;;
    clang) system clang clang ;;
    fuzzer) fuzzer ;;
    network) system ip iproute2 ;;
    arm) system "aarch64-linux-gnu-gcc qemu-aarch64" gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user ;;
    qemu) system qemu-riscv32 qemu-user ;;
    cross)
        system "aarch64-linux-gnu-gcc arm-linux-gnueabihf-gcc i686-linux-gnu-gcc riscv64-linux-gnu-gcc s390x-linux-gnu-gcc
            musl-gcc qemu-aarch64" gcc-aarch64-linux-gnu gcc-arm-linux-gnueabihf gcc-i686-linux-gnu gcc-riscv64-linux-gnu \
            gcc-s390x-linux-gnu libc6-dev-arm64-cross libc6-dev-armhf-cross libc6-dev-i386-cross libc6-dev-riscv64-cross \
            libc6-dev-s390x-cross musl-tools qemu-user
        ;;
    windows)
        system "x86_64-w64-mingw32-gcc x86_64-w64-mingw32-g++" gcc-mingw-w64-x86-64 g++-mingw-w64-x86-64 &&
            system wine64 wine64
        ;;
    openmpi) system "mpirun mpicc" openmpi-bin libopenmpi-dev ;;
    mpich) environment mpich 'mpich>=5,<6' ;;
    impi) environment impi 'impi-rt==2021.18.1' ;;
    ompi5) environment ompi5 'openmpi>=5,<6' ;;
    mpich4) environment mpich4 'mpich>=4,<5' ;;
    zig) environment zig 'ziglang>=0.15,<1' ;;
    wasm) system "emcc node" emscripten nodejs ;;
    pkgconf) system pkg-config pkgconf ;;
    cmake) system "cmake ninja" cmake ninja-build ;;
    conan) present conan || environment conan 'conan>=2,<3' ;;
    wheel) environment wheel hatchling ;;
    meson) present meson || environment meson meson ;;
    files) environment files 'safetensors>=0.8' 'numpy>=2' ml_dtypes cryptography ;;
    models) environment models torch transformers safetensors numpy ;;
    *)
        echo "install.sh: what is $1?" >&2
        false
        ;;
    esac
}

if [ "$1" = in ]; then
    echo "$checks/$2"
    exit 0
fi
status=0
for name; do
    group "$name" || { echo "missing: $name" && status=1; }
done
exit $status
