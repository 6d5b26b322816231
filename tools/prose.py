"""Count constructions in prose that read as translated, and compare them with what is recorded: python -m tools.prose

Prose is Markdown outside code blocks, and docstrings, comments and texts of Python files. A folder may have as many places as
tools/prose_limits.json says, and no more. `--lines PATH ...` shows them. `--record` writes lower counts down; it never writes a higher
one, except for a folder that is new.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LIMITS = Path("tools/prose_limits.json")
NOT_READ = ("tests/", "tools/prose.py", "benchmarks/results/")
RULES = {  # what is counted, and what to write
    r"\A(?-i:What|Whether|Whose|Where)\b(?!.*\?)": "begin with a verb or a noun",
    r"\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|better\b|worse\b)[a-z]": "write 'is not a ...' or 'there is no ...'",
    r"\bwhere (?:there|that|it|one|this|they|he|an?|the|no|none|nothing|its|both|all)\b": "write 'if' or 'when', unless it is a place",
    r"\balone\b": "write 'only'",
    r"\bbeside\b": "write 'next to' or 'also'",
    r"\bby (?:itself|themselves)\b": "write 'separately'",
    r"\b(?:nobody|somebody|whoever|anybody|everybody)\b": "name the actor",
    r"\b(?:mend(?:s|ed)?|heed(?:s|ed)?|seldom)\b": "take the common word",
    r"\bThere (?:is|are): ": "write 'Choose one of: ...'",
}
ONE = re.compile("|".join(f"(?P<r{at}>{rule})" for at, rule in enumerate(RULES)), re.IGNORECASE)
ADVICE = list(RULES.values())
CODE = re.compile(r"`[^`\n]*`")
FEWEST_WORDS = 4  # of a text in code that is prose


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers and lines of prose. Only the first line of a Python text begins without a space. Python that cannot be parsed
    ends the lines early."""
    text = path.read_text(errors="replace")
    if path.suffix == ".md":
        inside = False
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith("```"):
                inside = not inside
            elif not inside:
                yield number, f" {line.lstrip(' #|*->')}"
        return
    try:
        for number, token in tokens(text):
            if token.startswith("#"):
                yield number, f" {token.lstrip('# ')}"
            elif token.count(" ") >= FEWEST_WORDS - 1:
                for offset, line in enumerate(token.lstrip("rbfuRBFU").strip("\"'").splitlines()):
                    yield number + offset, " " * (offset > 0) + line.strip()
    except (tokenize.TokenError, SyntaxError):
        return


def tokens(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the source of comments and texts. An f-string, which Python 3.12 and later split, is yielded whole."""
    lines, inside = text.splitlines(keepends=True), []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            inside.append(token.start)
        elif kind == "FSTRING_END":
            row, column = inside.pop()
            if not inside:
                whole = "".join(lines[row - 1 : token.end[0]])
                yield row, whole[column : len(whole) - len(lines[token.end[0] - 1]) + token.end[1]]
        elif kind in ("COMMENT", "STRING") and not inside:
            yield token.start[0], token.string


def places(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, the advice and the line of each place in a file."""
    for number, line in prose(path):
        for found in ONE.finditer(CODE.sub("X", line)):
            yield number, ADVICE[int(str(found.lastgroup)[1:])], line


def folder_of(name: str) -> str:
    """Return the folder that a file counts for: a plugin, a library, a folder of core, else the first folder of its path."""
    parts = name.split("/")
    deep = 2 if parts[0] in ("plugins", "libs", "atropos_core", "docs") and len(parts) > 2 else 1
    return "/".join(parts[:deep]) if len(parts) > 1 else "."


def counts(root: Path = REPOSITORY) -> dict[str, int]:
    """Return how many places each folder has, among the files that git tracks or would."""
    found: Counter[str] = Counter()
    for name in files(root):
        found[folder_of(name)] += sum(1 for _ in places(root / name))
    return dict(found)


def files(root: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py", "*.md"],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    return sorted(
        {
            name
            for name in listed
            if name and not name.startswith(NOT_READ) and "/tests/" not in name
            if (root / name).is_file()
        }
    )


def too_many(found: dict[str, int], limits: dict[str, int]) -> dict[str, int]:
    """Return the folders with more places than their limit, and the limit. A new folder has none."""
    return {name: limits.get(name, 0) for name, count in sorted(found.items()) if count > limits.get(name, 0)}


def recorded(found: dict[str, int], limits: dict[str, int]) -> dict[str, int]:
    """Return the limits to write: the lower of count and limit, and the count of a new folder."""
    return {name: min(count, limits.get(name, count)) for name, count in sorted(found.items())}


def main(arguments: list[str], root: Path = REPOSITORY) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description="Count prose that reads as translated.")
    parser.add_argument("--lines", nargs="+", metavar="PATH", help="show each place in these files and folders")
    parser.add_argument("--record", action="store_true", help="write lower counts into tools/prose_limits.json")
    asked = parser.parse_args(arguments)
    if asked.lines:
        wanted = [str(Path(path).resolve().relative_to(root)) for path in asked.lines]
        for name in files(root):
            if any(one == "." or name == one or name.startswith(f"{one}/") for one in wanted):
                for number, advice, line in places(root / name):
                    print(f"{name}:{number}: {advice}\n    {line.strip()[:160]}")
        return
    path = root / LIMITS
    limits: dict[str, int] = json.loads(path.read_text()) if path.is_file() else {}
    found = counts(root)
    if asked.record:
        path.write_text(json.dumps(recorded(found, limits), indent=2) + "\n")
        return
    if worse := too_many(found, limits):
        told = [f"  {name}: {found[name]} places, {limit} are allowed" for name, limit in worse.items()]
        sys.exit(
            "\n".join(
                ["Prose that reads as translated was added. Show it with: python -m tools.prose --lines FOLDER", *told]
            )
        )
    if lower := {name for name in limits if found.get(name, 0) < limits[name]}:
        print(
            f"prose: {len(lower)} folders have fewer places than recorded. Record that: python -m tools.prose --record"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
