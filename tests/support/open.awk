# Opens an implementation's private functions to tests, so that none of them compiles an implementation of its own:
#
#   awk -v bodies=1 -f tests/support/open.awk dtrain.h  the implementation with nothing static, to be compiled once
#   awk -v bodies=0 -f tests/support/open.awk dtrain.h  the header of those that link with it: functions are declared alone
#
# The code's format makes this easy: functions and their braces begin at the first column. Inline functions, constant
# tables and what macros make are small, and stay copies in each file, but for the states of a process or thread.
function put(line)
{
    if (held != "")
        print held
    held = line
}

BEGIN { put(bodies ? "" : "#pragma GCC system_header\n#undef DTRAIN_API\n#define DTRAIN_API extern") }

/^\/\* ---- >>status ----/ || /^#ifdef DTRAIN_CUDA_IMPLEMENTATION/ { inside = 1 }

skip != "" { # a body, or values, up to their last line
    if ($0 ~ skip)
        skip = ""
    next
}

/^    static type \*name\(void\) / && bodies { sub(/static /, "") } # the macro that declares states

/^DTRAIN__(MUTEX_)?OF_[A-Z]+\(/ && !bodies {
    line = $0
    sub(/ *\/\*.*/, "", line)
    sub(/^DTRAIN__MUTEX_OF_PROCESS\(/, "(dtrain__os_mutex, ", line)
    sub(/^[^(]*\(/, "extern ", line)
    sub(/, /, " *", line)
    sub(/\)$/, "(void);", line)
    put(line)
    next
}

!inside || /^[ \t#\/*]/ {
    put($0)
    next
}

/^static inline / || /^DTRAIN__INLINE / || /^DTRAIN__CUDA_FN / { inlined = 1 }

/^\{/ && !bodies && !inlined {
    held = held ";"
    skip = "^}"
    next
}

/^[{}]/ {
    inlined = inlined && /^\{/
    put($0)
    next
}

{
    line = plain = $0
    gsub(/__attribute__\(\(.*\)\) ?|DTRAIN__PRINTF\([0-9], [0-9]\) ?| *\/\*.*/, "", plain)
    variable = plain !~ /\(/ && plain ~ /[;{]$|=/
    if (!inlined && plain ~ /^static / && !(variable && plain ~ / const /)) {
        function_pointer = plain ~ /^static [^(]*\(\*/
        sub(/static /, (variable || function_pointer) && !bodies ? "extern " : "", line)
        if (variable && !bodies && plain ~ /=/) {
            if (plain !~ /;$/)
                skip = ";$"
            sub(/ =.*/, ";", line)
        }
    }
    put(line)
}

END { put("") }
