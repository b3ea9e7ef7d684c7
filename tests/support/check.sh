# For the scripts of tests/: "check STATUS NAME" counts a fact, and shows the files that $logs names where it does not
# hold; "checked" prints the sums that end a script, and is its status; "build_line FILE COMPILER" prints the command of
# that compiler in the file's first comment, on one line, up to "&&" or the comment's end; "bottom_comment FILE" prints
# the comment that ends the file, without its marks; "lanes COMMAND <FILE" gives COMMAND the words of each line of the
# file, two lines at a time in subshells, as compilers and emulators use one processor each. $lane is then a directory of
# the subshell's own, $logs a file in it, and the sums are added. "calls FILE" prints a program without the lines that
# ask for the implementation, so that it links with an object of it. "sample N ITEM..." sets $chosen to N of the items,
# which follow from the number SAMPLE of the environment, and says which it leaves out; without SAMPLE it takes all.
passed=0
failed=0
check() {
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok $2"
    else
        failed=$((failed + 1))
        echo "FAIL $2"
        head -30 $logs 2>/dev/null
    fi
}
checked() {
    echo "$passed passed, $failed failed"
    [ $failed -eq 0 ]
}
lanes() {
    lanes=$(mktemp -d "${TMPDIR:-/tmp}/lanes.XXXXXX") || exit 1
    cat >"$lanes/all"
    for half in 0 1; do
        lane=$lanes/$half
        mkdir "$lane"
        awk -v half=$half 'NF && ++n % 2 != half' "$lanes/all" >"$lane/items"
        (
            passed=0 failed=0 logs=$lane/log
            while read -r items; do "$1" $items </dev/null; done <"$lane/items" >"$lane/out" 2>&1
            echo "$passed $failed" >"$lane/sums"
        ) &
    done
    wait
    for half in 0 1; do
        cat "$lanes/$half/out"
        read -r good bad <"$lanes/$half/sums" || { good=0 bad=1; }
        passed=$((passed + good))
        failed=$((failed + bad))
    done
    rm -rf "$lanes"
}
build_line() {
    sed -n '1,/\*\//p' "$1" | sed -e :join -e '/\\$/{' -e 'N; s| *\\\n \* *| |; b join' -e '}' |
        sed -n "s|^[/ ]\* \($2 .*\)|\1|p" | head -1 | sed 's| *\*/$||; s| *&& .*||'
}
bottom_comment() {
    awk '/^\/\*/ { text = "" } { text = text $0 "\n" } END { printf "%s", text }' "$1" |
        sed 's|^/\* *||; s| *\*/$||; s|^ \* ||' | sed '/^$/d'
}
calls() {
    sed '/^#define DTRAIN_\(CUDA_\)*IMPLEMENTATION$/d; /^#define DTRAIN_API static$/d' "$1"
}
sample() {
    most=$1
    shift
    chosen=$*
    [ -n "${SAMPLE:-}" ] && [ $# -gt "$most" ] || return 0
    chosen=$(echo "$*" | awk -v most="$most" -v seed="$SAMPLE" '{
        for (i = 1; i <= NF; i++) item[i] = $i
        for (i = 1; i <= most; i++) { # Park and Miller, CACM 31(10), 1988
            seed = (seed % 2147483646 + 1) * 16807 % 2147483647
            at = i + seed % (NF - i + 1)
            held = item[i]; item[i] = item[at]; item[at] = held
            printf "%s%s", (i > 1 ? " " : ""), item[i]
        }
    }')
    for item; do
        case " $chosen " in
        *" $item "*) ;;
        *) printf ' %s' "$item" ;;
        esac
    done | sed 's/^/left out:/; s/$/\n/'
}
