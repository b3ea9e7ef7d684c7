# Reads src/order.txt, src/cuda/order.txt, then the modules in their order, and prints the faults for which
# tests/unit/test_includes.sh looks, a line each: kind, file:line, text. The last line says how much it has read.
#
# It finds what stands at file scope by braces. A } in the first column ends all that are open.

function fault(kind, file, line, text)
{
    print kind " src/" file ":" line ": " text
}

# The part of a line outside comments, with 0 for each string and character
function code(line,    out)
{
    for (;;) {
        if (comment) {
            if (!match(line, /\*\//))
                return out
            line = substr(line, RSTART + 2)
            comment = 0
        }
        if (!match(line, /["']|\/[*\/]/))
            return out line
        out = out substr(line, 1, RSTART - 1) " "
        line = substr(line, RSTART)
        if (line ~ /^\/\*/) {
            comment = 1
            line = substr(line, 3)
        } else if (match(line, /^"([^"\\]|\\.)*"/) || match(line, /^'([^'\\]|\\.)*'/)) {
            out = out "0"
            line = substr(line, RLENGTH + 1)
        } else
            return out
    }
}

# kind: full, or for what another module may complete: prototype, opaque
function provide(name, kind)
{
    if (name !~ /^(\.|(dtrain|DTRAIN)_)/)
        return
    if (!((name, file) in provided)) {
        providers[name] = providers[name] " " file
        provided_at[name, file] = FNR
    }
    if (provided[name, file] != "full")
        provided[name, file] = kind
}

# Takes a declaration at file scope: {} stands for what is in braces, which is `body` for a list.
function declare(head, is_function, body,    n, list, i, is_variable, kind)
{
    if (head ~ /DTRAIN__[A-Z0-9_]+\(/) { # it may define its arguments, or names that begin with them
        n = split(head, list, /[^a-z0-9_]+/)
        for (i = 1; i <= n; i++)
            if (list[i] ~ /^dtrain_/ && !(list[i] in made))
                made[list[i]] = file
    }
    if (head ~ /^ *(typedef )? *(struct|union) +dtrain_[a-z0-9_]+( +dtrain_[a-z0-9_]+)? *$/) {
        sub(/ *$/, "", head)
        sub(/.* /, "", head)
        provide(head, "opaque")
        return
    }
    if (match(head, /(struct|enum|union) +dtrain_[a-z0-9_]+ *\{/)) {
        split(substr(head, RSTART, RLENGTH), list, /[ {]+/)
        provide(list[2], "full")
    }
    if (head ~ /(struct|union)[^(]*\{\}/)
        read_fields(body)
    if (head ~ /(^|[^a-z_])enum([^a-z_]|$)/) {
        n = split(body, list, ",")
        for (i = 1; i <= n; i++) {
            sub(/=.*/, "", list[i])
            gsub(/[^A-Za-z0-9_]/, "", list[i])
            provide(list[i], "full")
        }
    }
    is_variable = head ~ /(^| )static / && head !~ /\(\(unused\)\)/
    kind = "full"
    gsub(/__attribute__ *\(\([^{;]*\)\)|\[[^]]*\]| =.*/, "", head)
    if (match(head, /\(\*dtrain_[a-z0-9_]+\) *\(/))
        RSTART += 2
    else if (match(head, /dtrain_[a-z0-9_]+\(/)) {
        is_variable = 0
        if (!is_function && head !~ /typedef/)
            kind = "prototype"
    } else if (!match(head, /dtrain_[a-z0-9_]+ *$/))
        return
    head = substr(head, RSTART)
    sub(/[^a-z0-9_].*/, "", head)
    provide(head, kind)
    if (is_variable)
        variable[head, file] = 1
}

# The fields of a struct are provided as ".name".
function read_fields(body,    n, list, i)
{
    gsub(/__attribute__ *\(\([^;]*\)\)|\[[^]]*\]|:[^;,]*/, "", body)
    n = split(body, list, /[;,]/)
    for (i = 1; i < n; i++) {
        if (match(list[i], /\(\*[a-z0-9_]+\) *\(/))
            list[i] = substr(list[i], RSTART + 2, RLENGTH - 2)
        sub(/\).*/, "", list[i])
        if (match(list[i], /[A-Za-z0-9_]+ *$/)) {
            list[i] = substr(list[i], RSTART)
            sub(/ *$/, "", list[i])
            provide("." list[i], "full")
        }
    }
}

# `where`: the file, or the macro whose body this is. A tag behind "struct" needs no declaration for a pointer.
function read_names(text, where,    n, list, i, name)
{
    gsub(/[A-Za-z0-9_]+##|struct dtrain_[a-z0-9_]+ *\*/, "", text)
    gsub(/->|\./, " .", text)
    n = split(text, list, /[^.A-Za-z0-9_]+/)
    for (i = 1; i <= n; i++) {
        name = list[i]
        if (name !~ /^(\.[a-z]|(dtrain|DTRAIN)_)/ || name == where || index(not_ours, name " "))
            continue
        if (++mentions[name, file] == 1)
            users[name] = users[name] " " file
        if (!((name, where) in used_at)) {
            used_at[name, where] = FNR
            used[where] = used[where] " " name
        }
    }
}

function reaches(targets,    n, list, i)
{
    n = split(targets, list, " ")
    for (i = 1; i <= n; i++)
        if (!index(reach[file] " ", " " list[i] " "))
            reach[file] = reach[file] " " list[i]
}

FILENAME ~ /order\.txt$/ {
    cuda = FILENAME ~ /cuda/
    sub(/#.*/, "")
    if ($1 == "part") {
        part[parts++] = $2
        needs[$2] = $0
        sub(/^part [A-Z0-9]+( needs)?/, "", needs[$2])
    } else if (/^\[/) {
        gsub(/[][]|implementation/, "")
        block = $0
    } else if (NF > 0) {
        file = (cuda ? "cuda/" : "") $1
        module[++modules] = file
        guard[file] = block (cuda ? "DEVICE" : file ~ /\/os_posix/ ? "POSIX" : file ~ /\/os_windows/ ? "-POSIX" : "")
        stand_in[file] = block ~ /-/
    }
    next
}

FNR == 1 {
    if (head != "")
        declare(head)
    head = macro = ""
    depth = comment = inner_struct = 0
    file = FILENAME
    sub(/^src\//, "", file)
    folder = file
    sub(/[^\/]*$/, "", folder)
}

/^#include/ {
    split($0, target, "\"")
    if (target[2] == "dtrain.h") {
        for (i = 1; i <= modules; i++)
            if (module[i] ~ /\.h$/ && module[i] !~ /^cuda/)
                reaches(module[i])
    } else if (target[2] != "") {
        target[2] = folder target[2]
        sub(/^[a-z]+\/\.\.\//, "", target[2])
        reaches(target[2] reach[target[2]])
    }
    next
}

{ text = comment || /["'\/]/ ? code($0) : $0 }

text ~ /^ *# *(el)?if/ {
    read_names(text, "#if")
    if (text ~ /DTRAIN_NO_/ && file !~ /^cuda/ && (depth > 0 || text !~ /DTRAIN_NO_MPI/))
        fault("condition", file, FNR, "asks in a module which parts are left out")
}

macro == "" { not_ours = ".fd .events " } # of poll, and the parameters of a macro

text ~ /^ *# *define/ {
    split(text, words, /[^A-Za-z0-9_]+/)
    macro = words[3]
    if (match(text, /\([a-z0-9_, ]+\)/)) {
        words[1] = substr(text, RSTART + 1, RLENGTH - 2)
        gsub(/,/, "", words[1])
        gsub(/[a-z0-9_]+/, ".&", words[1])
        not_ours = not_ours words[1] " "
    }
    provide(macro, "full")
}

macro != "" {
    read_names(text, macro)
    if (!/\\$/)
        macro = ""
    next
}

{ read_names(text, file) }

depth > 0 && is_function && text ~ /struct [a-z0-9_]* *\{/ { inner_struct = 1 }

inner_struct {
    read_fields(text)
    if (text ~ /}/)
        inner_struct = 0
}

text ~ /^ *#/ || /^extern "C" \{/ { next }

/^}/ { depth = 1 }

{
    while (match(text, /[{};]/)) {
        mark = substr(text, RSTART, 1)
        if (depth == 0)
            head = head " " substr(text, 1, RSTART - 1)
        else if (!is_function)
            body = body substr(text, 1, RSTART)
        text = substr(text, RSTART + 1)
        if (mark == "{" && depth++ == 0) {
            is_function = head ~ /\) *$/
            head = head "{}"
            body = ""
        } else if (mark == "}" && depth > 0 && --depth == 0 && is_function) {
            declare(head, 1)
            head = ""
            is_function = 0
        } else if (mark == ";" && depth == 0) {
            declare(head, 0, body)
            head = ""
        }
    }
    if (depth == 0)
        head = head " " text
    else if (!is_function)
        body = body text
}

# Lists the sets of parts that can be left out: who leaves out a part leaves out those that need it. Without the
# part POSIX there are the modules of Windows.
function list_sets(    all, set, rest, i, n, list, k, whole)
{
    part[parts++] = "POSIX"
    for (all = 1; rest < parts; rest++)
        all *= 2
    for (set = 0; set < all; set++) {
        whole = 1
        without[sets] = ""
        rest = set
        for (i = 0; i < parts; i++) {
            missing[sets, part[i]] = rest % 2
            if (rest % 2)
                without[sets] = without[sets] " " part[i]
            else {
                n = split(needs[part[i]], list, " ")
                for (k = 1; k <= n; k++)
                    if (missing[sets, list[k]])
                        whole = 0
            }
            rest = int(rest / 2)
        }
        sets += whole
    }
}

function holds(guard, set,    n, list, i)
{
    n = split(guard, list, " ")
    for (i = 1; i <= n; i++)
        if (list[i] ~ /^-/ ? !missing[set, substr(list[i], 2)] : missing[set, list[i]])
            return 0
    return 1
}

# Returns the first set with which `given` holds and the guard of no module of `others` does, as in " without A B";
# "" if there is none
function gap(given, others,    n, list, i, key, set, open)
{
    n = split(others, list, " ")
    key = given
    for (i = 1; i <= n; i++) {
        if (guard[list[i]] == "" || guard[list[i]] == given)
            return ""
        key = key "|" guard[list[i]]
    }
    if (!(key in gaps)) {
        gaps[key] = ""
        for (set = 0; set < sets && gaps[key] == ""; set++) {
            open = holds(given, set)
            for (i = 1; i <= n && open; i++)
                open = !holds(guard[list[i]], set)
            if (open)
                gaps[key] = without[set] == "" ? " with every part" : " without" without[set]
        }
    }
    return gaps[key]
}

# Module `file` uses `name` at `line`, itself or by a macro.
function check_use(name, file, line,    n, list, i, stem, found, lack)
{
    if ((name, file) in provided)
        return
    if (!(name in providers)) {
        for (stem = name; stem != "" && !(stem in made); )
            if (!sub(/_[^_]*$/, "", stem))
                stem = ""
        if (stem == "") {
            if (name !~ /^\./ && users[name] ~ /^ [^ ]+ / && !((name, "#if") in used_at))
                fault("undefined", file, line, "uses " name ", which no module defines:" users[name])
            return
        }
        providers[name] = " " made[stem]
    }
    names++
    n = split(providers[name], list, " ")
    for (i = 1; i <= n; i++)
        if (list[i] == file || index(reach[file] " ", " " list[i] " "))
            found = found " " list[i]
    if (found == "") {
        fault("include", file, line, "uses " name " of" providers[name] ", which it does not include")
        return
    }
    for (i = 1; i <= n; i++)
        if (stand_in[list[i]])
            found = found " " list[i]
    lack = gap(guard[file], found)
    if (lack != "")
        fault("part", file, line, "uses " name " of" providers[name] ": undefined" lack)
}

# What module `file` declares or defines itself
function check_provided(name, file,    n, list, i, whole, lack)
{
    n = split(providers[name], list, " ")
    for (i = 1; i <= n; i++)
        if (provided[name, list[i]] == "full")
            whole = whole " " list[i]
    if (provided[name, file] == "prototype") {
        lack = gap(guard[file], whole)
        if (lack != "")
            fault("declared", file, provided_at[name, file], "declares " name ", undefined" lack)
        for (i = 1; i <= n && file !~ /\.h$/; i++)
            if (list[i] != file && !index(reach[list[i]] " ", " " file " "))
                fault("forward", file, provided_at[name, file], "declares " name " of " list[i] ", which does not include it")
    }
    for (i = 1; i <= n && name !~ /^\./ && provided[name, file] == "full" && stand_in[file]; i++)
        if (list[i] != file && provided[name, list[i]] == "full" && gap(guard[file] " " guard[list[i]], "") != "")
            fault("twice", file, provided_at[name, file], "defines " name " beside " list[i])
    if ((name, file) in variable) {
        whole = users[name]
        if (mentions[name, file] < 2)
            sub(" " file, "", whole)
        lack = gap(guard[file], whole)
        if (lack != "")
            fault("variable", file, provided_at[name, file], name " is unused" lack)
    }
}

END {
    if (head != "")
        declare(head)
    list_sets()
    for (m = 1; m <= modules; m++) {
        file = module[m]
        n = split(used[file], list, " ")
        for (i = 1; i <= n; i++) {
            name = list[i]
            line = used_at[name, file]
            check_use(name, file, line)
            k = split(used[name], inner, " ") # of a macro's body
            for (j = 1; j <= k; j++)
                if (!((inner[j], file) in used_at)) {
                    used_at[inner[j], file] = line
                    list[++n] = inner[j]
                }
        }
    }
    for (key in provided) {
        split(key, both, SUBSEP)
        check_provided(both[1], both[2])
    }
    print modules " modules, " names " uses of others' names, " sets " sets of parts"
}
