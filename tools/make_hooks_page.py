"""Writes docs/hooks.md from the hook specifications. Run from the project root: python tools/make_hooks_page.py"""

from __future__ import annotations

import inspect
from pathlib import Path

from atropos_core.plugins import spec as hooks

HEAD = """# What a plugin may add

*Made by `tools/make_hooks_page.py` from `atropos_core/plugins/spec.py`; a test holds the two together.*

A plugin is a Python package with an entry point in the group `atropos`:

```toml
[project.entry-points.atropos]
env_hello = "atropos_env_hello.plugin"
```

The module named there implements any of the hooks below. `atropos new environment hello` writes such a package, and
`atropos check hello` puts what it offers through the contract tests.

Hooks are called once, at start-up, and answer with a `Provider` per component: its name, one line about it, the class of
its options, and `build(options, context)`, which imports what is heavy. Installing a package never changes a run: a
component works when the run file or a flag names it. A plugin that does not load is reported by `atropos plugins`, and
only a run that names it fails.

| field of `Provider` | |
|---|---|
| `name` | what the user types |
| `summary` | one line for `atropos plugins` |
| `config` | a pydantic model of its options (`atropos_core.Options` refuses unknown keys) |
| `build` | `(options, RunContext) -> component`; called in the process that the component lives in |
| `transports` | engines, trainers, bridges: how weights can travel, given the options |
| `requires` | modules that must be installed, or `"cuda"`; checked before `build` |
| `idle` | engine, trainer: which options, and whether `devices` and `threads`, do nothing on \
these devices, and why: options are reported at the start (one run file may be for several machines), the other two refused |
| `runs_in` | `"process"`: in a child process of its own, behind the same interface |
| `core_api` | the versions of atropos-core that it was made for |

What each kind of component must do is in `atropos_core/interfaces.py`.

## Without a package

Wherever a run file or a flag takes a component's name, of any kind, it also takes its place: `./file.py:Name`, or `pkg.mod:Name`. One
rule goes for all kinds:

| `Name` is | then |
|---|---|
| a class of that kind | it is called with its options where it has any (`Options`, a class in it derived from `atropos_core.Options`), \
and with the `RunContext` where its constructor has a parameter `context` |
| an instance | it is the component |
| a function | of rewards and transforms it is the component (`async def`); of a loss the trainer's decorator makes it one; of other \
kinds it makes the component, and is called as a class is |
| a `Provider` | it says everything, as it would in a plugin |

What a plugin says in its `Provider`, a class says by an attribute of that name: `transports`, which an engine, a trainer and a bridge
must have (`transports = {"in_process"}`), `runs_in = "process"`, `requires`, `several_devices`.

```python
import atropos_core as atropos


class Shorter:
    # 0 for a reply of at most `limit` characters, else -1
    class Options(atropos.Options):
        limit: int = 100

    def __init__(self, options, context):
        self.limit, self.seed = options.limit, context.seed

    async def __call__(self, task, episodes):
        return [-float(len(episode.messages[-1]["content"]) > self.limit) for episode in episodes]
```

A relative path in a run file begins at the folder of that file; in a flag, where the command is typed. The run directory keeps the
absolute one, by which processes of the run and `atropos resume` find it.

## Hooks

"""


def page() -> str:
    sections = []
    for name, hook in vars(hooks).items():
        if name.startswith("atropos_"):
            signature = str(inspect.signature(hook)).replace("'", "")
            sections.append(f"### `{name}{signature}`\n\n{inspect.getdoc(hook)}\n")
    return HEAD + "\n".join(sections)


if __name__ == "__main__":
    Path("docs/hooks.md").write_text(page())
