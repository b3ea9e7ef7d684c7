# For the scripts of tests/: "check STATUS NAME" counts a fact, and shows the files that $logs names where it does not
# hold; "checked" prints the sums that end a script, and is its status; "build_line FILE COMPILER" prints the command of
# that compiler in the file's first comment, on one line, up to "&&" or the comment's end; "bottom_comment FILE" prints
# the comment that ends the file, without its marks; "lanes COMMAND <FILE" gives COMMAND the words of each line of the
# file, two lines at a time in subshells, as compilers and emulators use one processor each. $lane is then a directory of
# the subshell's own, $logs a file in it, and the sums are added. "calls FILE" prints a program without the lines that
# ask for the implementation, so that it links with an object of it. "sample N ITEM..." sets $chosen to N of the items,
# which follow from the number SAMPLE of the environment, and says which it leaves out; without SAMPLE it takes all.
# "timeout" is the system's, with a deadline that grows with TEST_SLOW, which tests/support/run.sh sets. A check that does
# not hold after one has passed is late: "checked" says how many are. "equal GOT EXPECTED" compares hashes; two that differ
# are no matter of time.
passed=0
failed=0
late=0
out_of_time=$(mktemp "${TMPDIR:-/tmp}/late.XXXXXX") || exit 1
rm -f "$out_of_time"
check() {
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok $2"
    else
        failed=$((failed + 1))
        [ ! -e "$out_of_time" ] || late=$((late + 1))
        echo "FAIL $2"
        cat "$out_of_time" 2>/dev/null
        head -30 $logs 2>/dev/null
    fi
    rm -f "$out_of_time"
}
checked() {
    [ $late -eq 0 ] || echo "$late by a deadline"
    echo "$passed passed, $failed failed"
    [ $failed -eq 0 ]
}
equal() {
    [ -z "$1" ] || [ -z "$2" ] || [ "$1" = "$2" ] || rm -f "$out_of_time"
    [ -n "$1" ] && [ "$1" = "$2" ]
}
timeout() {
    allowed=$(($1 * ${TEST_SLOW:-1}))
    shift
    command timeout $allowed "$@"
    set -- $? "$*"
    [ "$1" -ne 124 ] || echo "out of time after $allowed s: $2" >"$out_of_time"
    return "$1"
}
lanes() {
    lanes=$(mktemp -d "${TMPDIR:-/tmp}/lanes.XXXXXX") || exit 1
    cat >"$lanes/all"
    for half in 0 1; do
        lane=$lanes/$half
        mkdir "$lane"
        awk -v half=$half 'NF && ++n % 2 != half' "$lanes/all" >"$lane/items"
        (
            passed=0 failed=0 late=0 logs=$lane/log out_of_time=$lane/late
            while read -r items; do "$1" $items </dev/null; done <"$lane/items" >"$lane/out" 2>&1
            echo "$passed $failed $late" >"$lane/sums"
        ) &
    done
    wait
    for half in 0 1; do
        cat "$lanes/$half/out"
        read -r good bad slow <"$lanes/$half/sums" || { good=0 bad=1 slow=0; }
        passed=$((passed + good))
        failed=$((failed + bad))
        late=$((late + slow))
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
draws=0
sample() {
    most=$1
    shift
    chosen=$*
    draws=$((draws + 1)) # so that two lists of one length are drawn apart
    [ -n "${SAMPLE:-}" ] && [ $# -gt "$most" ] || return 0
    chosen=$(echo "$*" | awk -v most="$most" -v seed="$((SAMPLE + 7919 * draws))" '{
        for (i = 1; i <= NF; i++) item[i] = $i
        seed = seed % 2147483646 + 1
        for (i = 0; i < 3; i++) seed = seed * 16807 % 2147483647 # small seeds would draw alike
        for (i = 1; i <= most; i++) { # Park and Miller, CACM 31(10), 1988
            seed = seed * 16807 % 2147483647
            at = i + seed % (NF - i + 1)
            held = item[i]; item[i] = item[at]; item[at] = held
            printf "%s%s", (i > 1 ? " " : ""), item[i]
        }
    }')
    echo "left out:$(for item; do
        case " $chosen " in
        *" $item "*) ;;
        *) printf ' %s' "$item" ;;
        esac
    done)"
}
