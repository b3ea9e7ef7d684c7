#!/bin/sh
# The code of a program that includes dtrain.h stays as it is: its own functions have the same instructions and call the
# same functions of libm and libmvec with the header above them and without, and its preprocessor macros keep their
# values. Asks cc, or the compilers that COMPILERS in the environment names, at the flags that changed it before; with
# BITS=all there, at all of them, in C++, beside the CUDA companion, and above the whole implementation, as .ci/run does,
# or with SAMPLE=number at some.
cd "$(dirname "$0")/../.." || exit 1
dir=$(mktemp -d "${TMPDIR:-/tmp}/client.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
. tests/support/check.sh
logs="$dir/log $dir/diff"

# The functions client_* of an assembler file, without comments. Labels and the names of constants are numbered by their first use.
functions() {
    awk '{ sub(/[ \t]+(#+|\/\/|@) .*/, "") }
        /^_?client_[a-z]*:/ { on = 1; split("", numbers); used = 0 }
        /^[ \t]\.(size|cfi_endproc)/ { on = 0 }
        on {
            rest = $0; text = ""
            while (match(rest, /\.?L[A-Za-z_]*[0-9][0-9_]*/)) {
                label = substr(rest, RSTART, RLENGTH)
                if (!(label in numbers)) numbers[label] = ++used
                text = text substr(rest, 1, RSTART - 1) "L" numbers[label]
                rest = substr(rest, RSTART + RLENGTH)
            }
            print text rest
        }' "$1"
}

# With DTRAIN_API static nothing of the implementation is left to compile, after all of it was read.
static="-DDTRAIN_API=static -DDTRAIN_IMPLEMENTATION"

same() { # what is above, its flags; then the compiler, language and flags
    name=$1
    above=$2
    shift 2
    "$@" -w -S tests/unit/client.c -o "$dir/alone.s" >"$dir/log" 2>&1 &&
        "$@" -w -I. $above -S tests/unit/client.c -o "$dir/with.s" >>"$dir/log" 2>&1 &&
        functions "$dir/alone.s" >"$dir/alone" && functions "$dir/with.s" >"$dir/with" &&
        [ "$(grep -c '^_*client_[a-z]*:' "$dir/alone")" -eq 13 ] &&
        diff "$dir/alone" "$dir/with" >"$dir/diff"
    check $? "$*: the program's functions are the same below $name"
}

# Every macro that the compiler defines at some flags, as text, before and after the header.
macros() { # compiler, language and flags
    for flags in -O0 -Os "-Ofast -march=native" "-O2 -frounding-math -fsignaling-nans"; do
        "$@" $flags -dM -E - </dev/null 2>/dev/null
    done | awk '{ sub(/\(.*/, "", $2); print $2 }' | sort -u >"$dir/names"
    {
        echo '#define TEXT_(...) #__VA_ARGS__'
        echo '#define TEXT(...) TEXT_(__VA_ARGS__)'
    } >"$dir/text.h"
    sed 's/.*/"&" TEXT(&)/' "$dir/names" | "$@" -include "$dir/text.h" -E -P - >"$dir/before" 2>"$dir/log"
    {
        echo '#include <assert.h>'
        echo '#include "dtrain.h"'
        sed -n 's/^"\([^"]*\)" *\(".*"\)$/static_assert(__builtin_strcmp(TEXT(\1), \2) == 0, "\1");/p' "$dir/before"
    } >"$dir/macros.c"
    "$@" -w -I. $static -include "$dir/text.h" -fsyntax-only "$dir/macros.c" >"$dir/log" 2>&1 &&
        [ "$(grep -c '^static_assert' "$dir/macros.c")" -eq "$(wc -l <"$dir/names")" ] && [ "$(wc -l <"$dir/names")" -gt 100 ]
    check $? "$*: its macros keep their values"
}

# What a header saw between two regions of exact arithmetic, some compiler might not undo.
awk '/^DTRAIN__EXACT_BEGIN$/ { after = 1 } after && /^# *include </ { print FILENAME ":" FNR ": " $0 }' dtrain.h >"$dir/log"
[ ! -s "$dir/log" ] && grep -q '^DTRAIN__EXACT_BEGIN$' dtrain.h
check $? "no system header is included after exact arithmetic"

client() { # compiler, which may be several words
    cc=$*
    dir=$lane
    logs="$dir/log $dir/diff"
    command -v ${cc##* } >/dev/null 2>&1 || { echo "$cc is not here: its part is skipped"; return; }
    header="$static -include dtrain.h"
    same dtrain.h "$header" $cc -Ofast -march=native
    macros $cc -Ofast
    [ "${BITS:-}" = all ] || return
    sample 2 -O0 -Os -O2 -O2+-ffast-math -O3+-march=native
    for flags in $chosen; do
        flags=$(echo $flags | tr + ' ')
        same dtrain.h "$header" $cc $flags # gcc compiles what nothing calls at -O0
        same "dtrain.h without the implementation" "-include dtrain.h" $cc $flags
    done
    sample 1 companion=-O2 companion=-Ofast+-march=native whole=-Ofast+-march=native
    for one in $chosen; do
        flags=$(echo ${one#*=} | tr + ' ')
        case $one in
        companion*)
            same "dtrain.h and dtrain_cuda.h" \
                "$header -DDTRAIN_CUDA_EMULATE -DDTRAIN_CUDA_IMPLEMENTATION -include dtrain_cuda.h" $cc -x c++ $flags
            ;;
        whole*) same "the whole implementation" "-DDTRAIN_IMPLEMENTATION -include dtrain.h" $cc $flags ;;
        esac
    done
    for flags in -O0 -Os "-O2 -fno-math-errno" "-O2 -frounding-math -fsignaling-nans"; do
        macros $cc $flags
    done
    macros $cc -x c++ -Ofast
}

if [ -n "${COMPILERS:-}" ]; then printf '%s\n' $COMPILERS; else echo "${CC:-cc}"; fi >"$dir/compilers"
lanes client <"$dir/compilers"
checked
