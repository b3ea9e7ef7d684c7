#!/bin/sh
# Uses each package of dtrain from an empty project: make install with pkg-config, CMake and Meson, C and C++, for this
# system and for Windows, Conan, the port for vcpkg, and Python by ctypes (tests/interop/ctypes_ddp.py) and by the wheel.
# Installs what is missing where it can, and says what it skips. What counts is that programs link and run: the library is
# compiled without optimisation, and where it only has to link, in part.
# The number SAMPLE chooses one of pkg-config, CMake, Meson, Conan, vcpkg and the wheel.
#   [SAMPLE=N] sh tests/interop/packages.sh
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
unset MAKEFLAGS MFLAGS MAKELEVEL CFLAGS LDFLAGS DESTDIR PREFIX LIBDIR PKG_CONFIG_PATH PKG_CONFIG_LIBDIR LD_LIBRARY_PATH
root=$PWD
here=$root/build/packages
logs=$here/log
version=$(sh tools/package/version)
series=${version%.*}
rm -rf "$here"
mkdir -p "$here/empty"
cp tests/interop/packages_main.c "$here/empty/main.c"
cp tests/interop/packages_main.c "$here/empty/main.cc"
cd "$here/empty" || exit 1

install=$root/tests/support/install.sh
have() { # groups of tests/support/install.sh
    sh "$install" "$@" && return
    echo "skipped: what needs $* (it is missing and cannot be installed)"
    return 1
}
sample 1 pkg-config CMake Meson Conan vcpkg wheel
tools=" $chosen "
try() { # tool groups...
    case $tools in *" $1 "*) shift && have "$@" ;; *) false ;; esac
}
parts="-DDTRAIN_NO_MPI -DDTRAIN_NO_CHECKPOINT -DDTRAIN_NO_COMPRESS -DDTRAIN_NO_DEVICE -DDTRAIN_NO_LOOSE"
parts="$parts -DDTRAIN_NO_PARALLEL -DDTRAIN_NO_SHARD -DDTRAIN_NO_SOCKETS -DDTRAIN_NO_TRAIN"

# The program runs, and says the version of the packages. With "shared" it loads the library, else it has it inside.
runs() { # program kind
    [ "$("$1" 2>>"$logs")" = "$version" ] || return 1
    readelf -d "$1" | grep -q "NEEDED.*\[libdtrain.so.$series\]"
    [ $? -eq "$([ "$2" = shared ] && echo 0 || echo 1)" ]
}

# ---- what make install brings ----

rm -rf "$root/build/package"
make -C "$root" install CFLAGS=-O0 PREFIX="$here/prefix" >"$logs" 2>&1 &&
    make -C "$root" install CFLAGS=-O0 DESTDIR="$here/a stage" PREFIX=/usr >>"$logs" 2>&1
check $? "make install, and again with DESTDIR"
odd="$here/in & out|s"
make -C "$root" install CFLAGS=-O0 PREFIX="$odd" LIBDIR="$odd/lib & 64" >"$logs" 2>&1 &&
    { ! command -v pkg-config >/dev/null ||
        [ "$(PKG_CONFIG_PATH="$odd/lib & 64/pkgconfig" pkg-config --modversion dtrain)" = "$version" ] &&
        eval "${CC:-cc} main.c $(PKG_CONFIG_PATH="$odd/lib & 64/pkgconfig" pkg-config --cflags --libs dtrain) -o main" >>"$logs" 2>&1 &&
        LD_LIBRARY_PATH="$odd/lib & 64" runs ./main shared; }
check $? "make install into a path with a space, an & and a |"
make -C "$root" uninstall PREFIX="$odd" LIBDIR="$odd/lib & 64" >"$logs" 2>&1 && [ ! -e "$odd" ]
check $? "make uninstall leaves no folder that it made"
mkdir -p "$odd/share/man" "$odd/bin"
make -C "$root" install CFLAGS=-O0 PREFIX="$odd" >"$logs" 2>&1 && make -C "$root" install CFLAGS=-O0 PREFIX="$odd" >>"$logs" 2>&1 &&
    touch "$odd/include/other" && make -C "$root" uninstall PREFIX="$odd" >>"$logs" 2>&1
[ "$(cd "$odd" && find . | sort | tr '\n' ' ')" = ". ./bin ./include ./include/other ./share ./share/man " ]
check $? "it leaves folders that were there, and those that hold something else"
installed() { # directory: the programs run there, and have man pages
    for program in dtrun dtrace safetensors; do
        [ "$("$1/bin/$program" --help | head -c 12)" = "$(echo "usage: $program" | head -c 12)" ] &&
            [ -s "$1/share/man/man1/$program.1" ] || return 1
    done
}
installed "$here/prefix"
check $? "make install brings dtrun, dtrace and safetensors, with man pages"
lib=$here/prefix/lib
printf '#define DTRAIN_MPI\n#include <dtrain.h>\n' >all.c
${CC:-cc} -DDTRAIN_API=dtrain_public -I"$here/prefix/include" -E -P all.c 2>"$logs" | tr '\n' ' ' |
    grep -o 'dtrain_public [^(]*(' | sed 's/.*[ *]\([a-z0-9_]*\)($/\1/' | sort >public
nm -D --defined-only "$lib/libdtrain.so" | awk '{ print $3 }' | sort >exported
[ "$(wc -l <public)" -gt 200 ] && diff public exported >"$logs"
check $? "the shared library exports the $(wc -l <public) public functions and nothing else"
[ "$(grep '__' exported)" = "dtrain__all_files_need_dtrain_h_$(echo "$series" | tr . _)" ]
check $? "of private names it exports the one that ties files to their version"
nm -g --defined-only "$lib/libdtrain.a" | awk 'NF == 3 { print $3 }' | sort | diff public - >"$logs"
check $? "so does the static one"
readelf -d "$lib/libdtrain.so" | grep -q "SONAME.*\[libdtrain.so.$series\]" && [ -e "$lib/libdtrain.so.$series" ]
check $? "the shared library is named libdtrain.so.$series"

# Other languages can say what the header declares: no functions in it, no bit fields, one function with "...".
${CC:-cc} -DDTRAIN_API=dtrain_public -I"$here/prefix/include" -E all.c 2>"$logs" |
    awk '/^# [0-9]+ "/ { ours = $3 ~ /dtrain\.h"$/; next } ours' >declared
grep -n '^static\|inline\|[a-z] *: *[0-9]' declared >"$logs"
[ $? -eq 1 ] && [ "$(grep -c 'dtrain_public' declared)" -eq "$(wc -l <public)" ] &&
    [ "$(grep -c '\.\.\.' declared)" -eq 1 ]
check $? "the header declares flat structs, enums and functions alone"

mv "$root/build/package/dtrain.o" "$here" # for programs that have the header alone
rm -rf "$root/build/package"

# ---- pkg-config ----

with_pkg_config() { # name directory-of-dtrain.pc
    [ "$(PKG_CONFIG_PATH=$2 pkg-config --modversion dtrain)" = "$version" ] &&
        eval "${CC:-cc} main.c $(PKG_CONFIG_PATH=$2 pkg-config --cflags --libs dtrain) -o main" >"$logs" 2>&1 &&
        LD_LIBRARY_PATH=${2%/pkgconfig} runs ./main shared
    check $? "$1: pkg-config, the shared library"
}
if try pkg-config pkgconf; then
    with_pkg_config "make install" "$lib/pkgconfig"
    export PKG_CONFIG_PATH="$lib/pkgconfig"
    # shellcheck disable=SC2046
    ${CC:-cc} -static main.c $(pkg-config --static --cflags --libs dtrain) -o main >"$logs" 2>&1 && runs ./main static
    check $? "pkg-config, the static library"
    if command -v g++ >"$logs"; then
        # shellcheck disable=SC2046
        g++ -Wall -Wextra -Werror main.cc $(pkg-config --cflags --libs dtrain) -o main >"$logs" 2>&1 &&
            LD_LIBRARY_PATH=$lib runs ./main shared
        check $? "pkg-config, C++"
    else
        echo "skipped: C++ (there is no g++)"
    fi
    with_pkg_config "staged below a path with a space" "$here/a stage/usr/lib/pkgconfig"
    ln -s "a stage" "$here/stage"
    export PKG_CONFIG_PATH="$here/stage/usr/lib/pkgconfig" PKG_CONFIG_SYSROOT_DIR="$here/stage"
    eval "${CC:-cc} main.c $(pkg-config --cflags --libs dtrain) -o main" >"$logs" 2>&1 &&
        LD_LIBRARY_PATH="$here/stage/usr/lib" runs ./main shared
    check $? "pkg-config, with the stage as its sysroot"
    ! grep -rq "a stage" "$here/a stage/usr/lib/pkgconfig" "$here/a stage/usr/lib/cmake"
    check $? "the files of the stage do not name it"
    unset PKG_CONFIG_PATH PKG_CONFIG_SYSROOT_DIR
fi

# ---- Python ----

sed -n '/^ \*     import ctypes/,/^ \*\/$/s/^ \*     //p' "$root/src/manual/guide.h" | cmp - "$root/tests/interop/ctypes_ddp.py" >"$logs" 2>&1 &&
    [ "$(wc -l <"$root/tests/interop/ctypes_ddp.py")" -le 40 ]
check $? "the manual shows ctypes_ddp.py, of 40 lines at most"
grep -qF "find_package(dtrain $series)" "$root/src/manual/manual.h"
check $? "the manual asks CMake for this version"
if command -v python3 >"$logs"; then
    # Gradients of the first step are 2 (1, 2) and 1 (4, 0), their mean is (3, 2): w is (-0.5, 1). Those of the second
    # are -1.5 (1, 2) and -5 (4, 0), their mean is (-10.75, -1.5).
    python3 "$root/tests/interop/ctypes_ddp.py" "$lib/libdtrain.so" "$here/run" >trained 2>"$logs"
    [ $? -eq 0 ] && [ "$(cat trained)" = "step 2: 4.875 1.75
step 2: 4.875 1.75" ]
    check $? "ctypes: two ranks train by DDP, save and load a checkpoint"
else
    echo "skipped: ctypes (there is no python3)"
fi

# ---- Windows ----

# A program for Windows is there, and says the version where Wine can run it.
wine=$(PATH=$PATH:/usr/lib/wine command -v wine64)
cross=x86_64-w64-mingw32
runs_on_windows() { # program directory-of-the-DLL
    [ -e "$1" ] || return
    [ -n "$wine" ] || { echo "skipped: $1 is not run (there is no wine64)" && return; }
    cp "$2"/*.dll "$($cross-gcc -print-file-name=libgcc_s_seh-1.dll)" "$(dirname "$1")" 2>/dev/null # and the compiler's
    said=$(WINEDEBUG=-all WINEPREFIX="$here/wine" timeout 120 setsid "$wine" "$1" 2>>"$logs" </dev/null | tr -d '\r')
    [ "$said" = "$version" ]
}
for_windows() {
    have windows || command -v $cross-gcc >/dev/null 2>&1
}

# ---- CMake ----

project() { # directory what-makes-the-targets target language [objects]
    mkdir -p "$1"
    case $4 in CXX) file=main.cc ;; *) file=main.c ;; esac
    cp "$here/empty/$file" "$1"
    printf '%s\n' 'cmake_minimum_required(VERSION 3.14)' "project(empty $4)" "$2" "add_executable(main $file ${5:-})" \
        "target_link_libraries(main PRIVATE $3)" >"$1/CMakeLists.txt"
}
by_cmake() { # name directory kind arguments...
    name=$1 dir=$2 kind=$3
    shift 3
    cmake -S "$dir" -B "$dir/build" -DCMAKE_BUILD_TYPE=Debug "$@" >"$logs" 2>&1 &&
        cmake --build "$dir/build" >>"$logs" 2>&1 &&
        runs "$dir/build/main" "$kind"
    check $? "CMake: $name"
}
found_by_cmake() { # name option-that-says-where
    project "found $1" "find_package(dtrain $series REQUIRED)" dtrain::dtrain C
    by_cmake "find_package, dtrain::dtrain of $1" "found $1" shared "$2"
    project "header $1" "find_package(dtrain REQUIRED)" dtrain::header C "\"$here/dtrain.o\""
    by_cmake "find_package, dtrain::header of $1" "header $1" static "$2"
}
refused() { # version
    project "version $1" "find_package(dtrain $1 REQUIRED)" dtrain::dtrain C
    ! cmake -S "version $1" -B "version $1/build" "-DCMAKE_PREFIX_PATH=$moved" >"$logs" 2>&1 && grep -q "$version" "$logs"
    check $? "CMake: find_package refuses version $1"
}
moved="$here/moved & there"
mv "$here/prefix" "$moved"
lib=$moved/lib
if [ "$tools" != "${tools#* pkg-config }" ] && command -v pkg-config >/dev/null; then
    with_pkg_config "make install, moved below a path with a space and an &" "$lib/pkgconfig"
fi
if try CMake cmake; then
    found_by_cmake "make install, moved" "-DCMAKE_PREFIX_PATH=$moved"
    project static "set(dtrain_STATIC ON)
find_package(dtrain REQUIRED)" dtrain::dtrain C
    by_cmake "find_package, the static library" static static "-DCMAKE_PREFIX_PATH=$moved"
    project cxx "find_package(dtrain REQUIRED)" dtrain::dtrain CXX
    by_cmake "find_package, C++ alone" cxx shared "-DCMAKE_PREFIX_PATH=$moved"
    major=${version%%.*}
    minor=${series#*.}
    refused $((major + 1)).0
    refused "$major.$((minor + 1))"
    refused "$version.1"
    fetch="include(FetchContent)
FetchContent_Declare(dtrain SOURCE_DIR \"$root\")
FetchContent_MakeAvailable(dtrain)"
    project fetched "$fetch" dtrain::dtrain C
    by_cmake "FetchContent, dtrain::dtrain" fetched static "-DCMAKE_C_FLAGS=$parts"
    project "fetched header" "$fetch" dtrain::header C "\"$here/dtrain.o\""
    by_cmake "FetchContent, dtrain::header" "fetched header" static
    [ -z "$(find "fetched header" -name '*dtrain.c*' -o -name 'libdtrain*')" ]
    check $? "CMake: the library is not compiled where only the header is used"
    project below "add_subdirectory(\"$root\" dtrain)" dtrain::dtrain C
    by_cmake "add_subdirectory, as a shared library" below shared -DBUILD_SHARED_LIBS=ON "-DCMAKE_C_FLAGS=$parts"
    cmake -S "$root" -B cmake -DCMAKE_BUILD_TYPE=Debug -DBUILD_SHARED_LIBS=ON -DCMAKE_INSTALL_LIBDIR=lib/some "-DCMAKE_INSTALL_PREFIX=$here/by_cmake" >"$logs" 2>&1 &&
        cmake --build cmake >>"$logs" 2>&1 && cmake --install cmake >>"$logs" 2>&1
    check $? "CMake installs"
    installed "$here/by_cmake"
    check $? "it brings the programs, with man pages"
    cmake -S "$root" -B static -DCMAKE_BUILD_TYPE=Debug -DDTRAIN_TOOLS=OFF "-DCMAKE_C_FLAGS=$parts" "-DCMAKE_INSTALL_PREFIX=$here/alone" >"$logs" 2>&1 &&
        cmake --build static >>"$logs" 2>&1 && cmake --install static >>"$logs" 2>&1
    check $? "CMake installs the static library alone"
    ! command -v pkg-config >/dev/null 2>&1 || {
        eval "${CC:-cc} main.c $(PKG_CONFIG_PATH=$here/alone/lib/pkgconfig pkg-config --cflags --libs dtrain) -o main" >"$logs" 2>&1 &&
            runs ./main static
        check $? "pkg-config, what the static library alone needs"
    }
    if for_windows; then
        printf '%s\n' 'set(CMAKE_SYSTEM_NAME Windows)' "set(CMAKE_C_COMPILER $cross-gcc)" >windows.cmake
        toolchain=-DCMAKE_TOOLCHAIN_FILE=$PWD/windows.cmake
        project "windows fetched" "$fetch" dtrain::dtrain C
        cmake -S "windows fetched" -B "windows fetched/build" "$toolchain" -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_C_FLAGS=$parts" >"$logs" 2>&1 &&
            cmake --build "windows fetched/build" >>"$logs" 2>&1 && runs_on_windows "windows fetched/build/main.exe" none
        check $? "CMake for Windows: FetchContent, dtrain::dtrain"
        for kind in ON OFF; do
            at="$here/windows $kind"
            cmake -S "$root" -B "windows $kind" "$toolchain" -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_C_FLAGS=$parts" \
                -DDTRAIN_TOOLS=OFF -DBUILD_SHARED_LIBS=$kind "-DCMAKE_INSTALL_PREFIX=$at" >"$logs" 2>&1 &&
                cmake --build "windows $kind" >>"$logs" 2>&1 && cmake --install "windows $kind" >>"$logs" 2>&1
            check $? "CMake installs for Windows, with BUILD_SHARED_LIBS=$kind"
            project "windows found $kind" "find_package(dtrain $series REQUIRED)" dtrain::dtrain C
            cmake -S "windows found $kind" -B "windows found $kind/build" "$toolchain" "-Ddtrain_DIR=$at/lib/cmake/dtrain" >"$logs" 2>&1 &&
                cmake --build "windows found $kind/build" >>"$logs" 2>&1 && runs_on_windows "windows found $kind/build/main.exe" "$at/bin"
            check $? "CMake for Windows: find_package with BUILD_SHARED_LIBS=$kind"
            ! command -v pkg-config >/dev/null 2>&1 || {
                eval "$cross-gcc main.c $(PKG_CONFIG_PATH=$at/lib/pkgconfig pkg-config --cflags --libs dtrain) -o main.exe" >"$logs" 2>&1 &&
                    runs_on_windows ./main.exe "$at/bin"
                check $? "pkg-config for Windows with BUILD_SHARED_LIBS=$kind"
            }
        done
    fi
    nm -D --defined-only "$here/by_cmake/lib/some/libdtrain.so" | awk '{ print $3 }' | sort | diff public - >"$logs"
    check $? "CMake: its shared library exports the public functions"
    found_by_cmake CMake "-Ddtrain_DIR=$here/by_cmake/lib/some/cmake/dtrain"
    ! command -v pkg-config >/dev/null 2>&1 || with_pkg_config CMake "$here/by_cmake/lib/some/pkgconfig"
fi

# ---- Meson ----

by_meson() { # name directory kind arguments...
    name=$1 dir=$2 kind=$3
    shift 3
    cp main.c "$dir"
    "$meson" setup "$dir/build" "$dir" -Doptimization=0 "$@" >"$logs" 2>&1 &&
        "$meson" compile -C "$dir/build" >>"$logs" 2>&1 &&
        runs "$dir/build/main" "$kind"
    check $? "Meson: $name"
}
meson_project() { # directory arguments-of-dependency [arguments of executable]
    mkdir -p "$1"
    printf '%s\n' "project('empty', 'c')" "executable('main', 'main.c', dependencies: dependency($2)${3:+, $3})" >"$1/meson.build"
}
inside() { # directory: dtrain is a subproject of the project there
    mkdir -p "$1/subprojects"
    ln -s "$root" "$1/subprojects/dtrain"
}
if try Meson cmake meson; then
    meson=$(command -v meson || echo "$(sh "$install" in meson)/bin/meson")
    for kind in shared static; do
        meson_project "sub $kind" "'dtrain'"
        inside "sub $kind"
        by_meson "a subproject, $kind" "sub $kind" $kind -Ddefault_library=$kind --force-fallback-for=dtrain "-Dc_args=$parts"
    done
    meson_project "sub header" "'dtrain-header', fallback: 'dtrain'" "objects: '$here/dtrain.o'"
    inside "sub header"
    by_meson "a subproject, the header" "sub header" static
    if for_windows; then
        printf '%s\n' '[binaries]' "c = '$cross-gcc'" "ar = '$cross-ar'" '[host_machine]' "system = 'windows'" \
            "cpu_family = 'x86_64'" "cpu = 'x86_64'" "endian = 'little'" >windows.ini
        for kind in shared static; do
            meson_project "windows $kind" "'dtrain'"
            inside "windows $kind"
            cp main.c "windows $kind"
            "$meson" setup "windows $kind/build" "windows $kind" --cross-file windows.ini -Doptimization=0 \
                -Ddefault_library=$kind --force-fallback-for=dtrain "-Dc_args=$parts" >"$logs" 2>&1 &&
                "$meson" compile -C "windows $kind/build" >>"$logs" 2>&1 &&
                runs_on_windows "windows $kind/build/main.exe" "windows $kind/build/subprojects/dtrain"
            check $? "Meson for Windows: a subproject, $kind"
        done
    fi
    "$meson" setup meson "$root" -Doptimization=0 "--prefix=$here/by_meson" --libdir=lib/some >"$logs" 2>&1 &&
        "$meson" install -C meson >>"$logs" 2>&1
    check $? "Meson installs"
    installed "$here/by_meson"
    check $? "it brings the programs, with man pages"
    nm -D --defined-only "$here/by_meson/lib/some/libdtrain.so" | awk '{ print $3 }' | sort | diff public - >"$logs"
    check $? "Meson: its shared library exports the public functions"
    found_by_cmake Meson "-Ddtrain_DIR=$here/by_meson/lib/some/cmake/dtrain"
    if command -v pkg-config >/dev/null 2>&1; then
        with_pkg_config Meson "$here/by_meson/lib/some/pkgconfig"
        meson_project depends "'dtrain'"
        export PKG_CONFIG_PATH="$here/by_meson/lib/some/pkgconfig"
        by_meson "dependency('dtrain') of an installation" depends shared
        unset PKG_CONFIG_PATH
    fi
fi

# ---- Conan ----

if try Conan cmake conan; then
    conan=$(command -v conan || echo "$(sh "$install" in conan)/bin/conan")
    export CONAN_HOME="$here/conan"
    mkdir -p by_conan
    cp main.c by_conan
    printf '%s\n' 'cmake_minimum_required(VERSION 3.15)' 'project(empty C)' 'find_package(dtrain REQUIRED)' 'add_executable(main main.c)' \
        'target_link_libraries(main PRIVATE dtrain::dtrain)' >by_conan/CMakeLists.txt
    printf '%s\n' '[requires]' "dtrain/$version" '[generators]' CMakeDeps CMakeToolchain >by_conan/conanfile.txt
    "$conan" profile detect >"$logs" 2>&1 &&
        "$conan" create "$root/packaging/conan" -s build_type=Debug >>"$logs" 2>&1
    check $? "Conan creates the package"
    "$conan" install by_conan -s build_type=Debug --output-folder=by_conan/build >"$logs" 2>&1 &&
        cmake -S by_conan -B by_conan/build -DCMAKE_BUILD_TYPE=Debug -DCMAKE_TOOLCHAIN_FILE=conan_toolchain.cmake >>"$logs" 2>&1 &&
        cmake --build by_conan/build >>"$logs" 2>&1 && runs by_conan/build/main static
    check $? "a program requires it, and finds it by CMake"
fi

# ---- vcpkg ----

# Without vcpkg its functions are those of plain CMake, and the port's steps are the same.
if try vcpkg cmake; then
    port=$root/packaging/vcpkg/dtrain
    [ "$(sed -n 's/^  "version": "\(.*\)",$/\1/p' "$port/vcpkg.json")" = "$version" ]
    check $? "vcpkg.json has the version"
    if command -v python3 >"$logs"; then
        python3 -m json.tool "$port/vcpkg.json" >"$logs" 2>&1
        check $? "vcpkg.json is JSON"
    fi
    if command -v vcpkg >"$logs" 2>&1; then
        vcpkg install dtrain "--overlay-ports=$root/packaging/vcpkg" "--x-install-root=$here/vcpkg" >"$logs" 2>&1
        check $? "vcpkg installs the port"
        at=$(dirname "$(dirname "$(find "$here/vcpkg" -path '*/share/dtrain')")")
    else
        echo "skipped: vcpkg itself (it is not here)"
        at=$here/vcpkg
        cat >vcpkg.cmake <<'END'
function(run)
  execute_process(COMMAND ${CMAKE_COMMAND} ${ARGV} RESULT_VARIABLE bad)
  if(bad)
    message(FATAL_ERROR "${ARGV}")
  endif()
endfunction()
function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 "" "" SOURCE_PATH OPTIONS)
  run(-S "${_SOURCE_PATH}" -B "${BUILD}" -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_C_FLAGS=${PARTS}"
      "-DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR}" ${_OPTIONS})
endfunction()
function(vcpkg_cmake_install)
  run(--build "${BUILD}" --target install)
endfunction()
function(vcpkg_fixup_pkgconfig)
endfunction()
function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 "" "" "" FILE_LIST)
  file(INSTALL "${_FILE_LIST}" DESTINATION "${CURRENT_PACKAGES_DIR}/share/dtrain" RENAME copyright)
endfunction()
include("${PORT}/portfile.cmake")
END
        cmake "-DPORT=$port" "-DBUILD=$PWD/vcpkg" "-DPARTS=$parts" "-DCURRENT_PACKAGES_DIR=$at" -P vcpkg.cmake >"$logs" 2>&1
        check $? "the steps of the port run"
    fi
    [ -s "$at/share/dtrain/copyright" ] && [ -s "$at/share/dtrain/usage" ] && [ ! -e "$at/lib/cmake" ] && [ ! -e "$at/bin" ]
    check $? "files lie where vcpkg wants them"
    project "by vcpkg" "find_package(dtrain CONFIG REQUIRED)" dtrain::dtrain C
    by_cmake "find_package of vcpkg's package" "by vcpkg" static "-DCMAKE_PREFIX_PATH=$at"
fi

# ---- the wheel ----

if try wheel python wheel; then
    python=$(sh "$install" in wheel)/bin/python
    CC="${CC:-cc}" CFLAGS=-O0 "$python" -m pip wheel -q --no-build-isolation --no-deps -w "$here/wheel" "$root" >"$logs" 2>&1 &&
        "$python" -m pip install -q --no-deps --target "$here/site" "$here"/wheel/dtrain-"$version"-py3-none-*.whl >>"$logs" 2>&1
    check $? "pip builds the wheel of this version and installs it"
    export PYTHONPATH="$here/site"
    # The compiler says what the module's offsets and sizes have to be.
    "$python" - >layout.c 2>"$logs" <<'END'
import ctypes, dtrain
print('#define DTRAIN_MPI\n#include "dtrain.h"\n#include <stddef.h>\n#include <stdio.h>\nint main(void)\n{')
for name, kind in vars(dtrain).items():
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure):
        print(f'    printf("{name} %zu", sizeof({name}));')
        for field in kind._fields_:
            print(f'    printf(" %zu+%zu", offsetof({name}, {field[0]}), sizeof((({name} *)0)->{field[0]}));')
        print('    puts("");')
for name, value in vars(dtrain).items():
    if name.startswith("DTRAIN_"):
        print(f'    printf("{name} %d\\n", (int){name});')
print("    return 0;\n}")
END
    "$python" - >python_says 2>>"$logs" <<'END'
import ctypes, dtrain
for name, kind in vars(dtrain).items():
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure):
        at = [getattr(kind, field[0]) for field in kind._fields_]
        print(name, ctypes.sizeof(kind), *[f"{field.offset}+{field.size}" for field in at])
for name, value in vars(dtrain).items():
    if name.startswith("DTRAIN_"):
        print(name, value)
END
    ${CC:-cc} -DDTRAIN_DECLARATIONS_ONLY -I"$root" layout.c -o layout >>"$logs" 2>&1 && ./layout >c_says &&
        [ "$(grep -c '+' c_says)" -gt 40 ] && [ "$(grep -c '^DTRAIN_' c_says)" -gt 80 ] && diff c_says python_says >>"$logs"
    check $? "the structs of its module have the compiler's sizes and offsets, its constants their values"
    "$python" -c 'import dtrain
for line in open("public"):
    assert hasattr(dtrain, line.strip()) or "__" in line, line' >"$logs" 2>&1
    check $? "it has every public function"
    "$python" - >trained 2>"$logs" <<'END'
import ctypes, dtrain
def train(world, user):
    x = ctypes.c_float(dtrain.dtrain_comm_rank(world) + 1)
    status = dtrain.dtrain_all_reduce(world, ctypes.byref(x), ctypes.byref(x), 1, dtrain.DTRAIN_F32, dtrain.DTRAIN_SUM)
    print(x.value, flush=True)
    return status
desc = dtrain.dtrain_comm_desc(timeout_ms=60000)
run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(train)
assert dtrain.dtrain_run_threads(3, run, None, ctypes.byref(desc)) == dtrain.DTRAIN_OK, dtrain.dtrain_last_error()
END
    [ $? -eq 0 ] && [ "$(tr '\n' ' ' <trained)" = "6.0 6.0 6.0 " ] # 1 + 2 + 3
    check $? "three ranks reduce by it"
    unset PYTHONPATH
fi

# ---- the end ----

make -C "$root" uninstall PREFIX="$moved" >"$logs" 2>&1
[ ! -e "$moved" ]
check $? "make uninstall leaves nothing"
checked
