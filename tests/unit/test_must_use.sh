#!/bin/sh
# No result of a fallible call is lost by mistake: each public function that returns dtrain_status is declared so that
# compilers warn, and DTRAIN_IGNORE leaves a result on purpose.
set -u
cd "$(dirname "$0")/../.." || exit 1
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
. tests/support/check.sh
logs="$dir/log"

# The declarations that return dtrain_status: those with the macro go to $dir/marked, others to $dir/log.
awk -v marked="$dir/marked" '
    /^DTRAIN_API_MUST dtrain_status dtrain_[a-z0-9_]+[(]/ { print > marked }
    /^DTRAIN_API .*dtrain_status/ && !/[(].*dtrain_status|dtrain_status_name/ || /^dtrain_status/ { print FILENAME ": " $0 }
    ' src/*/*.h >"$dir/log"
[ ! -s "$dir/log" ]
check $? "every public function that returns dtrain_status is declared with DTRAIN_API_MUST"
grep -q dtrain_cuda_create "$dir/marked" && [ "$(wc -l <"$dir/marked")" -ge 165 ]
check $? "they are found"

# compiler and language, call; the output is in $dir/log
compiles() {
    printf '#include "dtrain.h"\nvoid f(dtrain_comm *comm);\nvoid f(dtrain_comm *comm)\n{\n    %s;\n}\n' "$2" >"$dir/a.c"
    $1 -O0 -D_DEFAULT_SOURCE -Wall -Wextra -Wpedantic -Werror -I. -c "$dir/a.c" -o "$dir/a.o" >"$dir/log" 2>&1
}
for compiler in gcc clang; do
    command -v $compiler >/dev/null 2>&1 || continue
    for language in "-std=c99" "-x c++ -std=c++11"; do
        ! compiles "$compiler $language" "dtrain_barrier(comm)" && grep -q "unused-result" "$dir/log"
        check $? "a result that nobody reads is warned of: $compiler $language"
        compiles "$compiler $language" "if (comm) DTRAIN_IGNORE(dtrain_barrier(comm)); else DTRAIN_IGNORE(dtrain_barrier(comm))"
        check $? "one that is ignored on purpose is not: $compiler $language"
    done
done

# What a compiler sees that knows neither gcc's syntax nor, below C++17 and C23, the standard's.
sees() { # standard; the declarations are in $dir/seen
    printf '#include "dtrain.h"\n' >"$dir/a.cc"
    ${CXX:-g++} -std="$1" -E -P -U__GNUC__ -I. "$dir/a.cc" 2>"$dir/log" | grep 'dtrain_status dtrain_' >"$dir/seen"
    grep -q 'dtrain_status dtrain_barrier' "$dir/seen"
}
sees c++11 && ! grep -q '__attribute__\|\[\[' "$dir/seen"
check $? "a compiler of another kind sees no attribute"
sees c++17 && grep -q '^ *\[\[nodiscard\]\] extern dtrain_status dtrain_barrier' "$dir/seen"
check $? "one of C++17 sees [[nodiscard]]"
checked
