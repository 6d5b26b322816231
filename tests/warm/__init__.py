"""`atropos` and its child processes without 5 s of imports each: forked from an interpreter that has made them.

A thousand processes that `make test` starts would import typer and pydantic, and five hundred of them torch and transformers, which
was more than half of the CPU that the tests took. What is started here is a process like any other: its own pid, a child of whoever
called `subprocess.Popen`, with the environment, the directory, the descriptors and the signals that were asked for. Only
`python -m MODULE` of the modules in `template.WARM` is started so, and only where everything that an
interpreter reads when it starts is as it was when the template started, but for folders in front of PYTHONPATH that hide no module;
all else is started as ever. `COLD=1 make test` starts everything as ever.

The workers of pytest-xdist are forked so too, each with a template of its own: what six of them would import is imported once.
"""

from __future__ import annotations

from pathlib import Path

NAME = "tests.warm.template"


def is_template(pid: int | str) -> bool:
    """Whether this is no process of what is tested, but one that some of those are forked from."""
    return NAME.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
