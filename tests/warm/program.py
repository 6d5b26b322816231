"""A program's text, run as `python -c TEXT WORDS` runs it: `python -m tests.warm.program TEXT WORDS`, which begins warm where others do."""

import sys

if __name__ == "__main__":
    text = sys.argv[1]
    sys.argv[:] = ["-c", *sys.argv[2:]]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
