#!/usr/bin/env python3
"""Counts words and sentences of what people read: README, manual, public comments, private comments.

A sentence of more than 30 words is a failure, and so is a README of more than 1,300 words, its code and tables included.

  python3 tests/unit/prose.py            every file, with a line for each sentence that is too long
  python3 tests/unit/prose.py FILE ...   these files alone; one that is none of the project's counts as given
  python3 tests/unit/prose.py --brief    the sums alone
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 30
README_WORDS = 1300
MANUAL = ("manual.h", "guide.h")

CODE = re.compile(r"[;{}\\]\s*$|^\s*#|DTRAIN_CHECK|^\s*\.\.\.|;\s{2,}\S|^\s*((\$|cc|gcc|nvcc|make|bash|git) |(build|tools)/\S)")
ENTRY = re.compile(r"^(\s*(?:[-*] )?\S+(?: \S+){0,5}?)(\s{2,}|\t)(\S.*)$")
END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[`]*[A-Z0-9`_])")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|al|cf|Fig|No|pp|Sec|Ch)\.$")


def comments(text):
    """(line, text) of each block comment of a C file, without its stars; neighbouring // lines are one comment."""
    pattern = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(/\*.*?\*/)|((?://[^\n]*(?:\n[ \t]*(?=//))?)+)', re.S)
    for m in pattern.finditer(text):
        body = m.group(1) or m.group(2)
        if not body:
            continue
        line = text.count("\n", 0, m.start()) + 1
        if m.group(1):
            body = re.sub(r"^[ \t]*\*(?!/)", "", body[2:-2], flags=re.M)
        else:
            body = re.sub(r"^[ \t]*//", "", body, flags=re.M)
        yield line, body


def paragraphs(lines, first):
    """(line, text) of each run of prose: blank lines, code and entries of a list end one. Python runs to a blank line."""
    held, start, python = [], first, False
    for at, line in enumerate(lines):
        text = line.rstrip()
        python = bool(text.strip()) and (python or text.startswith("     import "))
        entry = ENTRY.match(text)
        code = python or CODE.search(text) and (len(text) - len(text.lstrip()) >= 4 or not held)
        if not text.strip() or code or entry or re.match(r"^\s*(?:[-*] |\d+\. )|^-{4,}", text):
            if held:
                yield start, " ".join(held)
            held, start = [], first + at
            if not text.strip() or code:
                continue
            text = entry.group(3) if entry else re.sub(r"^\s*(?:[-*] |\d+\. |-+)", "", text)
        if not held:
            start = first + at
        held.append(text.strip())
    if held:
        yield start, " ".join(held)


def markdown(text):
    """Lines of a README with code blocks, table rules and marks of links blanked; a table's cell is a line."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            yield number, ""
        elif fenced or line.startswith("    ") or re.match(r"^\|[-| :]+\|$", line):
            yield number, ""
        elif line.startswith("|"):
            for cell in line.strip("|").split("|"):
                yield number, cell.strip()
                yield number, ""
        elif line.startswith("#"):
            yield number, line.lstrip("# ")
            yield number, ""
        else:
            yield number, re.sub(r"\]\([^)]*\)", "]", line)


def sentences(paragraph):
    held = ""
    for part in END.split(paragraph):
        held = (held + " " + part).strip()
        if not ABBREVIATION.search(held):
            yield held
            held = ""
    if held:
        yield held


def words(sentence):
    return [w for w in sentence.split() if re.search(r"[A-Za-z0-9]", w)]


def prose(path):
    """(line, sentence) of a file."""
    text = path.read_text()
    if path.suffix == ".md":
        blocks = []
        for number, line in markdown(text):
            if blocks and line and blocks[-1][1]:
                blocks[-1][1].append(line)
            else:
                blocks.append((number, [line] if line else []))
    else:
        blocks = [(line, body.split("\n")) for line, body in comments(text)]
        if path.parent.name == "examples" and text.rstrip().endswith("*/"):
            blocks.pop()  # what the program prints
    for line, lines in blocks:
        for at, paragraph in paragraphs(lines, line):
            for sentence in sentences(paragraph):
                yield at, sentence


def kinds():
    """Names of the kinds of text and their files."""
    public, private = [], []
    names = (ROOT / "src/order.txt").read_text().split("[implementation]")[0].split("\n")
    for name in names:
        if name.endswith(".h") and not name.startswith("manual/"):
            public.append(ROOT / "src" / name)
    public += [ROOT / "src/cuda/manual.h", ROOT / "src/cuda/cuda.h"]
    for path in sorted((ROOT / "src").rglob("*.[ch]")):
        if path not in public and path.name not in MANUAL:
            private.append(path)
    others = [p for d in ("examples", "tools") for p in sorted((ROOT / d).glob("*.[ch]"))]
    return [("README", [ROOT / "README.md"]), ("manual", [ROOT / "src/manual" / name for name in MANUAL]), ("public comments", public),
            ("private comments", private), ("examples and tools", others)]


def main(args):
    brief = "--brief" in args
    chosen = [Path(a).resolve() for a in args if not a.startswith("--")]
    passed = failed = 0
    known = kinds()
    known.append(("given", [p for p in chosen if all(p not in paths for _, paths in known)]))
    for kind, paths in known:
        count = total = over = longest = 0
        for path in paths if not chosen else [p for p in paths if p in chosen]:
            for line, sentence in prose(path):
                n = len(words(sentence))
                if n == 0:
                    continue
                count, total, longest = count + 1, total + n, max(longest, n)
                if n > MOST_WORDS:
                    over += 1
                    if not brief:
                        print(f"{path.relative_to(ROOT) if ROOT in path.parents else path}:{line}: {n} words: {sentence[:100]}")
        if count == 0:
            continue
        if kind == "README":
            total, prose_words = len(words(paths[0].read_text())), total
        else:
            prose_words = total
        print(f"{kind}: {total} words, {count} sentences, {prose_words / count:.1f} words each, longest {longest}, "
              f"{over} over {MOST_WORDS}")
        if over or (kind == "README" and total > README_WORDS):
            failed += 1
        else:
            passed += 1
    print(f"{passed} passed, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
