#!/bin/sh
# Starts real processes with build/dtrun, most of them shells and the small program below, and looks at what they get,
# how their output comes out and how they end. Ends with "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
mkdir -p build
dir=$(mktemp -d "${TMPDIR:-/tmp}/test_dtrun.XXXXXX") || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
unset DTRAIN_TOKEN DTRAIN_TOKEN_FILE DTRAIN_LISTEN_FD OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS
warnings="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror"
dtrun=$PWD/build/dtrun
child=$dir/child
. tests/support/check.sh
logs="$dir/out $dir/err"

try() { # what command...
    what=$1
    shift
    "$@"
    check $? "$what"
}

run() { # arguments of dtrun; output in $dir/out and $dir/err, exit status in $status
    timeout 20 "$dtrun" "$@" >"$dir/out" 2>"$dir/err"
    status=$?
}

start() { # the same in the background with the signals of a foreground process; its pid in $pid
    : >"$dir/out"
    "$child" fresh "$dtrun" "$@" >"$dir/out" 2>"$dir/err" </dev/null &
    pid=$!
}

end() { # waits for what start has started
    wait "$pid"
    status=$?
}

until_true() { # command...; for at most 20 seconds
    tries=400
    until "$@"; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || return 1
        sleep 0.05
    done
}

lines() { # count pattern: so many lines of the output match
    [ "$(grep -c -- "$2" "$dir/out")" -eq "$1" ]
}

out_is() { # the output, its lines sorted; \n between lines
    printf "$1" >"$dir/expected"
    sort "$dir/out" | cmp -s - "$dir/expected"
}

says() { # pattern, in standard error
    grep -q -- "$1" "$dir/err"
}

said='until grep -q "$0" "$ERR"; do sleep 0.05; done; ' # begins a rank that waits until dtrun's errors have the pattern $0
export ERR="$dir/err"

gone() { # is no process that has this word in its command line
    ! pgrep -f "$1" >"$dir/pgrep"
}

cat >"$child.c" <<'END'
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static const int passed_on[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
static const char *const names[] = {"got INT\n", "got TERM\n", "got HUP\n", "got QUIT\n", "got USR1\n", "got USR2\n"};

static void put(const char *text)
{
    if (write(1, text, strlen(text)) < 0)
        _exit(9);
}

static void tell(int signal_number)
{
    int i;
    for (i = 0; passed_on[i] != signal_number;)
        i++;
    if (signal_number == SIGTERM)
        usleep(200000);
    put(names[i]);
    if (signal_number == SIGTERM)
        _exit(0);
}

/* Lines that say who wrote them and how long they are, in pieces that end anywhere. */
static void flood(int lines)
{
    static char text[4096];
    const char *rank = getenv("DTRAIN_RANK");
    unsigned state = (unsigned)atoi(rank) + 1;
    size_t length = 0, done;
    int i;
    for (i = 0; i < lines; i++) {
        int letters = (int)((state = state * 1664525u + 1013904223u) >> 16) % 200;
        length += (size_t)sprintf(text + length, "%s %d %d ", rank, i, letters);
        memset(text + length, 'a' + atoi(rank) % 26, (size_t)letters);
        length += (size_t)letters;
        text[length++] = '\n';
        done = i + 1 == lines ? length : length / 3;
        if (write(i % 2 + 1, "", 0) < 0 || write(1, text, done) != (ssize_t)done)
            _exit(9);
        memmove(text, text + done, length -= done);
    }
}

static int listens(void)
{
    const char *fd = getenv("DTRAIN_LISTEN_FD"), *root = getenv("DTRAIN_ROOT");
    struct sockaddr_in address;
    int to = socket(AF_INET, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((unsigned short)atoi(strchr(root, ':') + 1));
    if (!fd || connect(to, (struct sockaddr *)&address, sizeof address) != 0)
        return 0;
    return accept(atoi(fd), NULL, NULL) >= 0;
}

static void show_signals(void)
{
    struct sigaction action;
    sigset_t mask;
    int i, other = 0, blocked = 0;
    sigprocmask(SIG_SETMASK, NULL, &mask);
    for (i = 1; i < 32; i++) {
        other += sigaction(i, NULL, &action) == 0 && action.sa_handler != SIG_DFL;
        blocked += sigismember(&mask, i) == 1;
    }
    printf("%d %d\n", other, blocked);
}

/* Runs a program with default signals, or with SIGINT, SIGHUP and SIGPIPE ignored and SIGTERM blocked. */
static void become(char **program, int fresh)
{
    sigset_t mask;
    int i;
    sigemptyset(&mask);
    for (i = 1; i < 32; i++)
        signal(i, SIG_DFL);
    if (!fresh) {
        signal(SIGINT, SIG_IGN);
        signal(SIGHUP, SIG_IGN);
        signal(SIGPIPE, SIG_IGN);
        sigaddset(&mask, SIGTERM);
    }
    sigprocmask(SIG_SETMASK, &mask, NULL);
    execv(program[0], program);
}

static void act(const char *what, char **rest)
{
    size_t i;
    if (strcmp(what, "fresh") == 0 || strcmp(what, "soiled") == 0)
        become(rest, what[0] == 'f');
    else if (strcmp(what, "flood") == 0)
        flood(atoi(rest[0]));
    else if (strcmp(what, "listens") == 0)
        puts(listens() ? "yes" : "no");
    else if (strcmp(what, "vanish") == 0 && (unlink(rest[0]) == 0 || errno == ENOENT))
        pause();
    else if (strcmp(what, "signals") == 0)
        show_signals();
    else if (strcmp(what, "descriptors") == 0) {
        for (i = 0; i < 1000; i++)
            if (fcntl((int)i, F_GETFD) >= 0)
                printf(getenv("DTRAIN_LISTEN_FD") && i == (size_t)atoi(getenv("DTRAIN_LISTEN_FD")) ? "L" : "%d", (int)i);
    } else if (strcmp(what, "long") == 0)
        for (i = (size_t)atoi(rest[0]); i > 0; i--)
            putchar('x');
    else if (strcmp(what, "tell") == 0 || strcmp(what, "stubborn") == 0) {
        for (i = 0; i < sizeof passed_on / sizeof *passed_on; i++)
            signal(passed_on[i], what[0] == 't' ? tell : SIG_IGN);
        put("ready\n");
        for (;;)
            pause();
    }
}

int main(int argc, char **argv)
{
    if (argc > 1)
        act(argv[1], argv + 2);
    return 0;
}
END

: >"$dir/out"
${CC:-cc} -O2 $warnings -I. tools/dtrun.c -o build/dtrun.$$ -lpthread -lm 2>"$dir/err" && mv build/dtrun.$$ build/dtrun
check $? "dtrun builds without a warning"
${CC:-cc} -O1 "$child.c" -o "$child" 2>"$dir/err" || { cat "$dir/err"; echo "0 passed, 1 failed"; exit 1; }

# ---- what a rank gets

run -n 3 sh -c 'echo $DTRAIN_RANK/$DTRAIN_WORLD_SIZE $DTRAIN_LOCAL_RANK/$DTRAIN_LOCAL_SIZE'
try "three ranks know their numbers" out_is '[0] 0/3 0/3\n[1] 1/3 1/3\n[2] 2/3 2/3\n'
try "all well is status 0 and silence" [ "$status$(cat "$dir/err")" = 0 ]

run -n 2 --no-prefix sh -c 'echo $DTRAIN_ROOT $DTRAIN_TOKEN'
try "both ranks have one root and one token" [ "$(sort -u "$dir/out" | wc -l)" -eq 1 ]
try "the root is a port of this host, the token 64 digits" lines 2 '^127\.0\.0\.1:[1-9][0-9]* [0-9a-f]\{64\}$'
cp "$dir/out" "$dir/before"
run -n 2 --no-prefix sh -c 'echo $DTRAIN_ROOT $DTRAIN_TOKEN'
try "each run has a token of its own" [ "$(cut -d' ' -f2 "$dir/out" "$dir/before" | sort -u | wc -l)" -eq 2 ]

run -n 2 --no-prefix sh -c 'echo $DTRAIN_JOB'
cp "$dir/out" "$dir/before"
DTRAIN_JOB=outer run -n 2 --no-prefix sh -c 'echo $DTRAIN_JOB'
try "a run is a job of its own, the same on its ranks" \
    [ "$(grep -ch '^dtrun-[0-9]*-[0-9a-f]*$' "$dir/out" "$dir/before" | sort -u).$(sort -u "$dir/out" "$dir/before" | wc -l)" = 2.2 ]

run -n 1 sh -c 'echo $OMP_NUM_THREADS $OPENBLAS_NUM_THREADS $MKL_NUM_THREADS'
try "a rank computes on one thread" out_is '[0] 1 1 1\n'
OMP_NUM_THREADS=7 run -n 1 --threads 3 sh -c 'echo $OMP_NUM_THREADS $OPENBLAS_NUM_THREADS $MKL_NUM_THREADS'
try "--threads leaves what the environment says" out_is '[0] 7 3 3\n'

echo "sixteen letters." >"$dir/token"
chmod 600 "$dir/token"
run -n 2 --node 1/3 --root far:77 --token-file "$dir/token" sh -c 'echo $DTRAIN_RANK/$DTRAIN_WORLD_SIZE $DTRAIN_LOCAL_RANK/$DTRAIN_LOCAL_SIZE $DTRAIN_ROOT "$DTRAIN_TOKEN" ${DTRAIN_LISTEN_FD-none}'
try "node 1 of 3 holds ranks 2 and 3 of 6" \
    out_is '[2] 2/6 0/2 far:77 sixteen letters. none\n[3] 3/6 1/2 far:77 sixteen letters. none\n'
try "a private token file is used in silence" [ "$status$(cat "$dir/err")" = 0 ]
DTRAIN_JOB=ours run -n 1 --node 1/3 --root far:77 --token-file "$dir/token" sh -c 'echo $DTRAIN_JOB'
try "a node of several has the job that its caller names" out_is '[1] ours\n'
chmod 644 "$dir/token"
run -n 1 --token-file "$dir/token" sh -c 'echo "$DTRAIN_TOKEN"'
try "a token file that others may read is warned of" says '^dtrun: warning: token file'
try "and used" out_is '[0] sixteen letters.\n'
DTRAIN_TOKEN_FILE=/nowhere DTRAIN_TOKEN=old DTRAIN_RANK=9 DTRAIN_LISTEN_FD=9 run -n 1 \
    sh -c 'echo $DTRAIN_RANK ${#DTRAIN_TOKEN} ${DTRAIN_TOKEN_FILE-none}'
try "an older environment is overwritten" out_is '[0] 0 64 none\n'

run -n 2 "$child" listens
try "rank 0 alone inherits the listening socket" out_is '[0] yes\n[1] no\n'
run -n 3 --unix sh -c 'root=${DTRAIN_ROOT#unix:}; echo $root ${DTRAIN_LISTEN_FD-none}; touch $root'
root=$(sed -n 's/^\[0\] \(.*\) none$/\1/p' "$dir/out")
try "--unix gives a path and no descriptor" lines 3 '/root none$'

exec 7</dev/null 9>"$dir/nine"
run -n 3 "$child" descriptors
exec 7<&- 9>&-
try "a rank has descriptors 0, 1 and 2, rank 0 its listening socket, and no others" \
    out_is '[0] 012L\n[1] 012\n[2] 012\n'
timeout 9 "$child" soiled "$dtrun" -n 2 "$child" signals >"$dir/out" 2>"$dir/err"
try "a rank starts with default signals, none blocked" out_is '[0] 0 0\n[1] 0 0\n'
printf 'one\ntwo\n' >"$dir/in"
run -n 3 cat <"$dir/in"
try "the standard input is rank 0's alone" out_is '[0] one\n[0] two\n'
timeout 9 "$dtrun" -n 2 sh -c 'echo out; echo err >&2; cat' >"$dir/out" 2>"$dir/err" <&-
try "a closed standard input is an empty one" out_is '[0] out\n[1] out\n'
timeout 9 "$dtrun" -n 2 sh -c 'echo quiet >&2' >&- 2>"$dir/err"
try "a closed standard output is no trouble" [ $? -eq 0 ]
timeout 9 "$dtrun" -n 2 sh -c 'echo result' >&- 2>"$dir/err"
try "but what the ranks print to it is not lost in silence" [ $? -eq 1 ]
try "and dtrun says so" says '^dtrun: standard output: Bad file descriptor; ending the ranks$'

# ---- output

run -n 2 sh -c 'echo to out; echo to err >&2'
try "output stays output" out_is '[0] to out\n[1] to out\n'
try "and errors errors" [ "$(sort "$dir/err" | tr '\n' ,)" = "[0] to err,[1] to err," ]
run -n 1 printf 'a\n\nno end'
try "empty lines stay, a last line gets its end" out_is '[0] \n[0] a\n[0] no end\n'
run -n 1 printf '\r10%%\r20%%\r\ndone\r\n\r\nlast\r'
try "a carriage return ends a line, with a newline only one" out_is '[0] \n[0] 10%%\n[0] 20%%\n[0] done\n[0] last\n'
run -n 1 "$child" long 65536
try "64 KiB are one line" [ "$(wc -l <"$dir/out") $(wc -c <"$dir/out")" = "1 65541" ]
run -n 1 --no-prefix "$child" long 150000
try "longer lines are cut" [ "$(awk '{ print length }' "$dir/out" | tr '\n' ' ')" = "65536 65536 18928 " ]
timeout 20 "$dtrun" -n 8 "$child" flood 4000 >"$dir/out" 2>&1
try "eight ranks that write in pieces make 32,000 whole lines" awk '
    $1 != "[" $2 "]" || $3 != n[$2]++ || length($5) != $4 || $5 !~ /^([a-h])*$/ { bad++ }
    { letters = $5; gsub(substr($5, 1, 1), "", letters); if (letters != "") bad++ }
    END { exit bad || NR != 32000 }' "$dir/out"
timeout 20 "$dtrun" -n 4 sh -c "$child flood 2000 >&2 & $child flood 2000; wait" 2>&1 | cat >"$dir/out"
try "so do output and error in one pipe" awk '$1 != "[" $2 "]" || length($5) != $4 { bad++ } END { exit bad || NR != 16000 }' "$dir/out"
timeout 20 "$dtrun" -n 2 "$child" flood 20000 2>"$dir/err" | { sleep 0.5; cat; } >"$dir/out"
try "a slow reader gets everything" [ "$(wc -l <"$dir/out")" -eq 40000 ]
run -n 2 sh -c 'exec >&-; sleep 0.2; echo late >&2'
try "a rank may close its output" [ "$status $(sort "$dir/err" | tr '\n' ,)" = "0 [0] late,[1] late," ]

# ---- ends

run --grace-ms 100 -n 4 sh -c '[ $DTRAIN_RANK -ne 2 ] || { sleep 0.1; exit 7; }; exec sleep 60' --grace-ms
try "the exit status is that of the rank that failed" [ $status -eq 7 ]
try "which is named" says '^dtrun: rank 2 (pid [0-9]*) exited with status 7; ending the other 3 ranks, as --survivors is not set$'
try "the others are ended after the grace period" says '^dtrun: 3 ranks did not end within 100 ms: SIGTERM$'
try "and each rank's end is told in one line" \
    [ "$(sed -n 's/^dtrun: rank \(.\) (pid [0-9]*) \(.*\)$/\1 \2/p' "$dir/err" | tail -4 | tr '\n' ,)" = \
    "0 was killed by signal 15 (Terminated),1 was killed by signal 15 (Terminated),2 exited with status 7, the first to fail,3 was killed by signal 15 (Terminated)," ]
run --grace-ms 9000 -n 3 sh -c '[ $DTRAIN_RANK -ne 2 ] || kill -9 $$; '"$said"'echo ended by myself; exit 3' 'ending the other 2'
try "a killed rank gives 128 and its signal" [ $status -eq 137 ]
try "and is named" says '^dtrun: rank 2 (pid [0-9]*) was killed by signal 9 (Killed); ending the other 2 ranks, as --survivors is not set$'
try "the others may end by themselves within the grace period" lines 2 'ended by myself'
run --grace-ms 100 -n 2 sh -c '[ $DTRAIN_RANK -eq 0 ] || { sleep 0.1; exit 1; }; exec "$0" stubborn' "$child"
try "SIGKILL ends who ignores SIGTERM" says '^dtrun: rank 0 (pid [0-9]*) was killed by signal 9 (Killed)$'
run -n 3 sh -c 'sleep 0.$DTRAIN_RANK'
try "ranks may end one after the other" [ "$status$(cat "$dir/err")" = 0 ]
run --grace-ms 0 --survivors -n 3 sh -c '[ $DTRAIN_RANK -ne 2 ] || kill -9 $$; '"$said"'sleep 0.3; echo trained on' 'go on: 2$'
try "with --survivors the others go on after the grace period" lines 2 'trained on'
try "which dtrun says" says '^dtrun: rank 2 (pid [0-9]*) was killed by signal 9 (Killed); ranks that go on: 2$'
try "and the exit status is that of the rank that failed" [ $status -eq 137 ]
run --grace-ms 0 --survivors -n 3 sh -c '[ $DTRAIN_RANK -eq 2 ] || exit $((5 - DTRAIN_RANK)); '"$said"'sleep 0.3; echo trained on' 'go on: 1$'
try "so does the last of three" lines 1 'trained on'
try "whose last loss leaves one" says '^dtrun: rank [01] (pid [0-9]*) exited with status [45]; ranks that go on: 1$'
start -n 3 --survivors sh -c '[ $DTRAIN_RANK -ne 0 ] || exit 7; echo ready; exec sleep 60'
until_true says '; ranks that go on: 2$' && until_true lines 2 ready
kill -TERM $pid
end
try "a SIGTERM ends the survivors" [ "$status $(grep -c 'rank [12] .* killed by signal 15' "$dir/err")" = "7 2" ]
run --grace-ms 50 -n 1 sh -c 'echo only; kill -SEGV $$'
try "one rank alone fails in one line" [ "$status $(wc -l <"$dir/err")" = "139 1" ]

run -n 3 "$dir/missing"
try "a missing program is status 127 and one line" \
    [ "$status $(cat "$dir/out" "$dir/err")" = "127 dtrun: cannot run $dir/missing: No such file or directory" ]
run -n 3 "$dir/token"
try "so is a file that is no program" [ "$status $(cat "$dir/err")" = "127 dtrun: cannot run $dir/token: Permission denied" ]
run --grace-ms 50 -n 2 sh -c 'exec "$0"' "$dir/missing"
try "a shell that finds no program is a rank that failed" [ $status -eq 127 ]
cp "$child" "$dir/vanishing"
run -n 200 "$dir/vanishing" vanish "$dir/vanishing"
try "a program that vanishes leaves no rank" \
    [ "$status $(cat "$dir/err")" = "127 dtrun: cannot run $dir/vanishing: No such file or directory" ]
try "not one process" gone "$dir/vanishing"

start -n 3 "$child" tell
until_true lines 3 ready
for signal in HUP INT USR1 USR2 QUIT; do
    kill -$signal $pid
    until_true lines 3 "got $signal" || break
done
try "SIGHUP, INT, USR1, USR2 and QUIT reach every rank" \
    [ "$(cut -c5- "$dir/out" | sort | uniq -c | tr -s ' \n' ' ')" = " 3 got HUP 3 got INT 3 got QUIT 3 got USR1 3 got USR2 3 ready " ]
sleep 0.6
kill -TERM $pid
end
try "a SIGTERM after it is SIGKILL" [ $status -eq 137 ]
start -n 2 "$child" tell
until_true lines 2 ready
kill -TERM $pid
end
try "ranks that end well by SIGTERM are status 0" [ "$status $(grep -c 'got TERM' "$dir/out")" = "0 2" ]
command timeout 3 "$dtrun" -n 2 "$child" tell >"$dir/out" 2>"$dir/err"
try "timeout(1), which sends it twice at once, does not cut them short" lines 2 'got TERM'
start -n 2 --grace-ms 100 "$child" stubborn
until_true lines 2 ready
kill -INT $pid
end
try "SIGKILL follows a SIGINT that is ignored" [ $status -eq 137 ]
start -n 2 sh -c 'echo ready; exec sleep 60'
until_true lines 2 ready
kill -INT $pid
end
try "ranks that die by SIGINT are status 130" [ $status -eq 130 ]
try "and dtrun says what it did" says '^dtrun: signal 2 (Interrupt) passed on; '

state_is() { # letter: the state of every rank
    [ "$(ps -o stat= -p "$(sed -n 's/^\[.\] //p' "$dir/out" | tr '\n' ,)$pid" | cut -c1 | sort -u)" = "$1" ]
}
start -n 2 sh -c 'echo $$; exec "$0" stubborn --no-ready' "$child"
until_true lines 4 .
sed -i.old /ready/d "$dir/out"
kill -TSTP $pid
try "SIGTSTP stops dtrun and its ranks" until_true state_is T
kill -CONT $pid
try "SIGCONT lets them go on" until_true state_is S
kill -TERM $pid 2>/dev/null
sleep 0.3
kill -TERM $pid 2>/dev/null
end

start -n 3 --unix sh -c '"$0" stubborn & touch ${DTRAIN_ROOT#unix:}; echo ${DTRAIN_ROOT#unix:}; wait' "$child"
until_true lines 6 .
root=$(sed -n 's/^\[0\] \(.*\/root\)$/\1/p' "$dir/out")
try "the unix root is in a private directory" [ "$(ls -ld "${root%/root}" | cut -c1-10)" = drwx------ ]
kill -TERM $pid 2>/dev/null
sleep 0.3
kill -TERM $pid 2>/dev/null
end
try "it is gone after a SIGTERM" [ ! -e "${root%/root}" ]
try "and so are the ranks' children" until_true gone "$child"
start -n 3 --unix sh -c '"$0" stubborn & touch ${DTRAIN_ROOT#unix:}; echo ${DTRAIN_ROOT#unix:}; wait' "$child"
until_true lines 6 .
root=$(sed -n 's/^\[0\] \(.*\/root\)$/\1/p' "$dir/out")
kill -KILL $pid
wait "$pid" 2>/dev/null
try "kill -9 of dtrun leaves no process" until_true gone "$child"
try "and no directory" until_true [ ! -e "${root%/root}" ]
run -n 2 sh -c '"$0" stubborn >/dev/null 2>&1 </dev/null & sleep 0.2' "$child"
try "what a rank leaves behind does not hold dtrun up" [ $status -eq 0 ]
try "and ends with it" until_true gone "$child"
run -n 2 sh -c '(sleep 0.3; echo last words) &'
try "but may finish its last words" lines 2 'last words'

timeout 9 "$dtrun" -n 2 --grace-ms 200 sh -c 'while echo more; do sleep 0.02; done; exec "$0" stubborn' "$child" 2>"$dir/err" | head -1 >"$dir/out"
try "when nobody reads any more the ranks are ended" until_true gone "$child"
try "and dtrun says so" says '^dtrun: standard output: Broken pipe; ending the ranks$'

run -n 64 sh -c 'echo $DTRAIN_RANK $DTRAIN_WORLD_SIZE; exec sleep 0.2'
try "64 ranks start and end" [ "$status $(sort -u "$dir/out" | wc -l)" = "0 64" ]
(
    ulimit -Sn 64 2>/dev/null
    run -n 100 true
    [ $status -eq 0 ]
)
check $? "the soft limit of descriptors is raised where 100 ranks need it"

# ---- command lines that are refused

refused() { # words of the message, then arguments
    what=$1
    shift
    run "$@"
    [ $status -eq 2 ] && [ ! -s "$dir/out" ] && [ "$(wc -l <"$dir/err")" -eq 1 ] && says "^dtrun: .*$what"
}

printf 'fifteen letters' >"$dir/short"
: >"$dir/empty"
try "no arguments" refused "-n: a number of ranks from 1 to 4096 is expected; see dtrun --help"
try "no program" refused "PROGRAM: the program to run is expected" -n 2
try "-n 0" refused "1 to 4096" -n 0 true
try "-n -1" refused "1 to 4096" -n -1 true
try "-n 2x" refused "-n 2x: a whole number from 1 to 4096 is expected; see dtrun --help" -n 2x true
try "-n without a number" refused "-n: a value is expected after it" -n
try "an unknown flag" refused "--frob: there is no such flag" --frob -n 2 true
try "--node 2/2" refused "--node 2/2: I from 0 to 1 is expected" -n 1 --node 2/2 true
for node in 1 / 0/0 0/2x x/2 -1/2 0/65537; do
    try "--node $node" refused "--node $node: I/N is expected, as in 0/2" -n 1 --node $node true
done
try "several nodes without a root" refused "need --root" -n 1 --node 0/2 --token-file "$dir/token" true
try "several nodes without a token" refused "token-file" -n 1 --node 0/2 --root a:1 true
try "--unix over several nodes" refused "leave out --root" -n 1 --node 0/2 --unix --root a:1 --token-file "$dir/token" true
try "a root without a port" refused "host:port" -n 1 --root localhost true
try "a token file that is not there" refused "No such file" -n 1 --token-file "$dir/none" true
chmod 600 "$dir/short" "$dir/empty"
try "a token that is too short" refused "needs at least 16" -n 1 --token-file "$dir/short" true
try "an empty token file" refused "16 to 255" -n 1 --token-file "$dir/empty" true
try "a directory as token file" refused "no regular file" -n 1 --token-file "$dir" true
mkfifo -m 600 "$dir/pipe"
try "a pipe as token file" refused "no regular file" -n 1 --token-file "$dir/pipe" true
printf 'sixteen letters.\000and more\n' >"$dir/zero"
chmod 600 "$dir/zero"
try "a token with a byte of 0" refused "a byte of 0" -n 1 --token-file "$dir/zero" true
try "--threads 0" refused "--threads 0: a whole number from 1 to 65536" -n 1 --threads 0 true

[ -x build/train_gpt ] || make build/train_gpt >/dev/null
for wire in tcp unix shm; do
    for without in "" abstract; do
        DTRAIN_WITHOUT=$without DTRAIN_TRANSPORT=$wire run -n 2 build/train_gpt --steps 1 --quiet --csv "$dir/csv" --svg "$dir/svg"
        check $status "two ranks meet over $wire${without:+ without names of unix sockets}"
    done
done

checked
