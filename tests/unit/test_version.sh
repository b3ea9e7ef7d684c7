#!/bin/sh
# Files that include dtrain.h link only with an implementation of the same major and minor version, in C and C++. The
# structs are those of the version: tests/support/structs.txt has a checksum of them.
cd "$(dirname "$0")/../.." || exit 1
dir=$(mktemp -d "${TMPDIR:-/tmp}/version.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
. tests/support/check.sh
logs="$dir/log"
unset MAKEFLAGS MFLAGS MAKELEVEL
warnings="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror"
make -s build/tests/libdtrain.a >"$dir/log" 2>&1
check $? "the library of the tests is built"

# A program of two files that include a header of another version, or of this one. It uses a desc, as most do.
for part in same patch minor major; do
    mkdir "$dir/$part"
    awk -v part="$(echo "$part" | tr a-z A-Z)" \
        '$1 == "#define" && $2 == "DTRAIN_VERSION_" part { $3++ } { print }' dtrain.h >"$dir/$part/dtrain.h"
done
cat >"$dir/main.c" <<'EOF'
#include "dtrain.h"
int other(const dtrain_comm_desc *desc);
int main(void)
{
    dtrain_comm_desc desc = {0};
    return other(&desc) + (dtrain_status_name(DTRAIN_OK)[0] != 'O');
}
EOF
printf '#include "dtrain.h"\nint other(const dtrain_comm_desc *desc);\nint other(const dtrain_comm_desc *desc) { return desc->rank; }\n' >"$dir/other.c"
sed 's/= {0}/= {}/; s/^int other/extern "C" int other/' "$dir/main.c" >"$dir/main.cc"

links() { # version of main's header
    ${CC:-cc} $warnings -I"$dir/$1" -c "$dir/main.c" -o "$dir/main.o" >"$dir/log" 2>&1 &&
        ${CC:-cc} $warnings -I. -c "$dir/other.c" -o "$dir/other.o" >>"$dir/log" 2>&1 &&
        ${CC:-cc} "$dir/main.o" "$dir/other.o" build/tests/libdtrain.a -o "$dir/main" -lpthread -lm >>"$dir/log" 2>&1 &&
        "$dir/main"
}
refused() { # version of main's header, in the name of the symbol
    ! links "$1" && [ -f "$dir/other.o" ] && grep -q "dtrain__all_files_need_dtrain_h_$2" "$dir/log"
}
series=$(sh tools/package/version)
minor=${series#*.}
minor=${minor%.*}
major=${series%%.*}
for part in same patch; do
    links $part
    check $? "a file with the header of this version links with the library ($part)"
done
refused minor "${major}_$((minor + 1))"
check $? "one with another minor version does not, and the linker names the version that it needs"
refused major "$((major + 1))_$minor"
check $? "nor does one with another major version"

if command -v "${CXX:-c++}" >/dev/null; then
    cxx() { # version
        ${CXX:-c++} -Wall -Wextra -Werror -Wno-missing-field-initializers -I"$dir/$1" "$dir/main.cc" "$dir/other.o" \
            build/tests/libdtrain.a -o "$dir/main" -lpthread -lm >"$dir/log" 2>&1 && "$dir/main"
    }
    cxx same
    check $? "C++ links with the same version"
    ! cxx minor && grep -q dtrain__all_files_need_dtrain_h_ "$dir/log"
    check $? "and not with another"
else
    echo "there is no C++ compiler: C++ is skipped"
fi

# A program that loads the library at run time has it nowhere to link with.
printf '#include "dtrain.h"\nint main(void) { dtrain_comm_desc desc = {0}; return desc.rank; }\n' >"$dir/loads.c"
${CC:-cc} $warnings -DDTRAIN_DECLARATIONS_ONLY -I. "$dir/loads.c" -o "$dir/loads" >"$dir/log" 2>&1 && "$dir/loads"
check $? "with DTRAIN_DECLARATIONS_ONLY a file links without the library"

# ---- the structs ----

printf '#define DTRAIN_MPI\n#include "dtrain.h"\n' >"$dir/all.c"
sum=$(${CC:-cc} -I. -E "$dir/all.c" | awk '/^# [0-9]+ "/ { ours = $3 ~ /dtrain\.h"$/; next }
    ours && /^typedef/ { on = 1 } ours && on { print } /^}.*;$/ || /^typedef.*;$/ { on = 0 }' | tr -d ' \t\n' | cksum | tr ' ' -)
is="$major.$minor $sum"
echo "the structs of this header are: $is" >"$dir/log"
echo "raise DTRAIN_VERSION_MINOR in src/base/base.h, and write both into tests/support/structs.txt" >>"$dir/log"
[ "$(cat tests/support/structs.txt)" = "$is" ]
check $? "the structs and enums are those of version $major.$minor"
checked
