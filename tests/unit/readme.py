#!/usr/bin/env python3
"""Holds README.md and the manual, src/manual/manual.h and guide.h, to what they show: called by tests/unit/readme.sh.

  python3 tests/unit/readme.py snippets        each code block of the manual, and of the headers, stands in one function
                                               of snippets.c or test_snippets_parts.c, in order
  python3 tests/unit/readme.py programs DIR    looks at README's program, and writes that of its three steps into DIR, in
                                               both ways of including: one.c; caller.c and implementation.c
  python3 tests/unit/readme.py commands DIR    runs README's commands in DIR; prints what differs from the output that it
                                               shows
  python3 tests/unit/readme.py tables          the tables of examples, environment variables, parts and sections are complete

--readme FILE, --manual FILE and --snippets FILE read other files in place of the real ones; --header FILE reads that
header alone.
"""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
HASH = re.compile(r"\b[0-9a-f]{16,}\b")

passed = failed = 0


def check(good, what, why=""):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(f"{'ok' if good else 'FAIL'} {what}" + (f"\n{why}" if why and not good else ""))


def solid(code):
    """Code without comments and white space. C++ wants {}, so snippets say ZERO for {0}."""
    return re.sub(r"\s+", "", re.sub(r"/\*.*?\*/", "", code, flags=re.S)).replace("={0};", "=ZERO;")


# ---- the manual ----


def manual_blocks(text):
    """(line, lines) of each block of code up to CONVENTIONS: what is indented by five, without what stands beside it."""
    blocks, held, start, section = [], [], 0, ""
    for number, line in enumerate(text.split("\n"), 1):
        body = line[2:]
        if re.match(r" {0,2}[A-Z]", body):
            section = body.strip()
        if section.startswith(("PARTS", "CONVENTIONS")):
            break
        code = body.startswith("     ") and not section.startswith("CONTENTS")
        if code and section.startswith(("PORTING", "WHICH CALLS", "The data", "Ranks with", "What must", "Flags")):  # tables, and code
            code = re.search(r";(\s{3}|$)|^ +for \(", body)
        if code:
            if not held:
                start = number
            held.append(re.sub(r"\s{3,}.*", "", body.strip()))
        elif held:
            blocks.append((start, held))
            held = []
    return blocks


def header_blocks(name, text):
    """(name:line, lines) of each block of a header's comments: what is indented by five, without what stands beside it.
    A block is code if one of its lines ends in ; { or }. Formulas and tables have no such line, logs and commands a # or $."""
    blocks, held, start = [], [], 0
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r" \*     ", line):
            if not held:
                start = number
            held.append(re.sub(r"\s{3,}.*|\s*//.*|\s*\*/$", "", line[2:].strip()))
        elif held:
            if any(re.search(r"[;{}]$", code) for code in held) and not re.search(r"[#$]", "".join(held)):
                blocks.append((f"{name}:{start}", held))
            held = []
    return blocks


def snippets(manual, headers, source):
    functions = [solid(f) for f in re.split(r"(?<=\n)}\n", source)]
    blocks = [(f"manual:{line}", lines) for line, lines in manual_blocks(manual)]
    check(len(blocks) >= 15, f"the manual has {len(blocks)} blocks of code")
    of_headers = [block for name, text in headers for block in header_blocks(name, text)]
    check(of_headers, f"the headers have {len(of_headers)} blocks of code")
    for start, lines in blocks + of_headers:
        best = (-1, "")
        for function in functions:
            at = found = 0
            missing = ""
            for line in lines:
                if line.startswith("..."):
                    continue
                place = function.find(solid(line), at)
                if place < 0:
                    missing = missing or line
                else:
                    at, found = place + 1, found + 1
            best = max(best, (found if missing else len(lines) + 1, missing))
        check(best[0] > len(lines), f"{start}: the block stands in one function of the snippets",
              f"  the nearest function lacks, or has at another place: {best[1]}")


# ---- README: programs ----

# A line through 7 points of y = x * x, from x = -2 on. The loop in doubles is that of one rank, without dtrain.
FIXTURE = """
static const size_t count = 2, examples = 7;

static int as_one_rank(const float *params)
{
    double slope = 0, level = 0;
    for (int step = 0; step < 20; step++) {
        double d_slope = 0, d_level = 0;
        for (int x = -2; x <= 4; x++) {
            d_slope += (slope * x + level - x * x) * x;
            d_level += slope * x + level - x * x;
        }
        slope -= 0.1 * d_slope / 7;
        level -= 0.1 * d_level / 7;
    }
    slope -= (double)params[0];
    level -= (double)params[1];
    return slope * slope < 1e-10 && level * level < 1e-10;
}

int main(void)
{
    float params[2] = {0, 0}, grads[2];
%s
    if (!as_one_rank(params))
        return 1;
    puts("trained");
    return 0;
}
"""
# What stands for each "..." of the block: the program's own gradients, and its own update, in a loop.
OWN = ["""for (int step = 0; step < 20; step++) {
    grads[0] = grads[1] = 0;
    for (size_t i = first; i < first + mine; i++) {
        float x = (float)i - 2, error = params[0] * x + params[1] - x * x;
        grads[0] += error * x;
        grads[1] += error;
    }""", """for (size_t i = 0; i < count; i++)
        params[i] -= 0.1f * grads[i];
}"""]


def fences(text):
    return [m.group(1) for m in re.finditer(r"^```c\n(.*?)^```$", text, re.M | re.S)]


def programs(readme, directory):
    """Compares the first block with quickstart.c, which a command of README builds; writes programs of the others."""
    blocks = fences(readme)
    whole = [b for b in blocks if "int main(" in b]
    heads = [b for b in blocks if "int main(" not in b and all(re.match(r"#|$", line) for line in b.split("\n"))]
    calls = [b for b in blocks if b not in whole and b not in heads]
    static = ["DTRAIN_API static" in head for head in heads]
    check((len(whole), static, len(calls)) == (1, [True, False], 1),
          "README has a program, two ways to include dtrain.h, static first, and the calls",
          f"  {len(whole)}, {static} and {len(calls)} blocks")
    own = iter(OWN)
    body = re.sub(r"^\.\.\..*$", lambda _: next(own, "?"), "".join(calls), flags=re.M)
    check(next(own, None) is None and "?" not in body, "the calls have two places for the program's own code", body)
    check(whole and whole[0] in (ROOT / "examples/quickstart.c").read_text(), "README's program is examples/quickstart.c")
    (directory / "one.c").write_text(heads[0] + FIXTURE % body)
    (directory / "caller.c").write_text('#include "dtrain.h"\n' + FIXTURE % body)
    (directory / "implementation.c").write_text(heads[-1])


# ---- README: commands ----


def commands(text):
    """(command, output, marked) of the indented blocks: a command begins with "$ "; its output follows."""
    found = []
    for line in re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S).split("\n"):
        if line.startswith("    $ "):
            command, mark, _ = line[6:].partition("# not run here")
            found.append([command.strip(), [], bool(mark)])
            open_block = True
        elif line.startswith("    ") and found and open_block:
            found[-1][1].append(line[4:])
        elif line.strip():
            open_block = False
            if line.startswith("    "):
                found.append(["", [line[4:]], False])
    return found


def form(text):
    """Figures become #; a hash becomes the number of its first appearance, so that equal ones stay equal."""
    seen = {}
    text = HASH.sub(lambda m: "<hash " + "abcdefgh"[seen.setdefault(m.group(), len(seen)) % 8] + ">", text)
    return [re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip() for line in text.strip().split("\n")]


def run_commands(readme, directory):
    found = commands(readme)
    check(len(found) >= 5, f"README has {len(found)} commands")
    for command, output, marked in found:
        if marked:
            print(f"skipped, as README says: {command}")
            continue
        ran = subprocess.run(["sh", "-c", command], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)
        came = ran.stdout.decode()
        expected = form("\n".join(output)) if output else None
        good = ran.returncode == 0 and (expected is None or form(came) == expected)
        check(good, f"README: {command}",
              f"  status {ran.returncode}\n  README has:\n    " + "\n    ".join(output) + "\n  it printed:\n    " +
              "\n    ".join(came.strip().split("\n")) + "\n" + ran.stderr.decode()[-800:])


# ---- tables of the manual ----


def tables(manual, readme):
    source = "\n".join(p.read_text() for p in sorted((ROOT / "src").rglob("*.[ch]")) if p.name not in ("manual.h", "guide.h"))
    read = set(re.findall(r'(?:getenv|dtrain__place_(?:get|number|option|pair)?)\((?:[^;"]*?)"([A-Z_]+)"', source))
    read = {n for n in read | set(re.findall(r'"(DTRAIN_(?:WORLD_SIZE|LISTEN_FD|SECURE|INSECURE|TIMEOUT_MS))"', source))
            if n.startswith(("DTRAIN_", "TMPDIR"))}
    part = manual[manual.index(" * ENVIRONMENT"):manual.index(" * MACROS")]
    named = set(re.findall(r"^ \*     ((?:DTRAIN_[A-Z_]+|TMPDIR)(?:, DTRAIN_[A-Z_]+)*) ", part, re.M))
    named = {n for line in named for n in line.split(", ")}
    check(read == named, "ENVIRONMENT names every variable that src/ reads", f"  only src/: {read - named}; only manual: {named - read}")
    parts = re.findall(r"^part (\w+)", (ROOT / "src/order.txt").read_text(), re.M)
    listed = re.findall(r"^ \*     ([A-Z]+) +\d+ +\d+ %", manual, re.M)
    check(sorted(parts) == sorted(listed), "PARTS lists every part of src/order.txt", f"  {parts} {listed}")
    contents = set(re.findall(r"^ \*     (>>[a-z_-]+)", manual, re.M))
    public = (ROOT / "src/order.txt").read_text().split("[implementation]")[0]
    heads = "\n".join((ROOT / "src" / name).read_text() for name in re.findall(r"^\S+\.h$", public, re.M))
    marks = set(re.findall(r"---- (>>[a-z_-]+) ----", heads))
    files = {p.name for p in (ROOT / "examples").glob("*.*") if p.suffix != ".h"}
    shown = set(re.findall(r"^\| `(\w+\.\w+)` \|", readme, re.M))
    check(files == shown, "README's table has every example", f"  only examples/: {files - shown}; only README: {shown - files}")
    check(contents == marks, "CONTENTS names every section of the public headers", f"  {contents ^ marks}")


def main(args):
    def option(name, default):
        if name in args:
            at = args.index(name)
            path = args[at + 1]
            del args[at:at + 2]
            return Path(path).read_text()
        return default and (ROOT / default).read_text()

    readme = option("--readme", "README.md")
    manual = option("--manual", "src/manual/manual.h").replace(" * CONVENTIONS", (ROOT / "src/manual/guide.h").read_text() + " * CONVENTIONS")
    source = option("--snippets", "tests/unit/snippets.c")
    header = option("--header", None)
    parts = ROOT / "tests/unit/test_snippets_parts.c"
    if args[0] == "snippets":
        order = (ROOT / "src/order.txt").read_text().split("[implementation]")[0]
        names = re.findall(r"^\S+/\S+\.h$", order, re.M) + ["cuda/manual.h", "cuda/cuda.h"]
        if parts.exists():
            source += parts.read_text()
        else:
            names = [name for name in names if name.split("/")[0] not in ("parallel", "loose", "device", "cuda")]
        headers = [("header", header)] if header else [(name, (ROOT / "src" / name).read_text()) for name in names]
        snippets(manual, headers, source)
    elif args[0] == "programs":
        programs(readme, Path(args[1]))
    elif args[0] == "commands":
        run_commands(readme, Path(args[1]))
    elif args[0] == "tables":
        tables(manual, readme)
    print(f"{passed} passed, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
