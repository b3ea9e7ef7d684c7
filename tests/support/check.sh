# For the scripts of tests/: "check STATUS NAME" counts a fact, and shows the files that $logs names where it does not
# hold; "checked" prints the sums that end a script, and is its status; "build_line FILE COMPILER" prints the command of
# that compiler in the file's first comment, on one line, up to "&&" or the comment's end; "bottom_comment FILE" prints
# the comment that ends the file, without its marks.
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
build_line() {
    sed -n '1,/\*\//p' "$1" | sed -e :join -e '/\\$/{' -e 'N; s| *\\\n \* *| |; b join' -e '}' |
        sed -n "s|^[/ ]\* \($2 .*\)|\1|p" | head -1 | sed 's| *\*/$||; s| *&& .*||'
}
bottom_comment() {
    awk '/^\/\*/ { text = "" } { text = text $0 "\n" } END { printf "%s", text }' "$1" |
        sed 's|^/\* *||; s| *\*/$||; s|^ \* ||' | sed '/^$/d'
}
