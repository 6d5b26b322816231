"""The memory of each recipe on the hardware that it states, by the memory plan: `python -m tests.planned_recipes` writes it into
the headers."""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
from collections import defaultdict
from pathlib import Path

from atropos_core.cli.options import configure
from atropos_core.config.run_file import read_file
from atropos_core.launch.memory_plan import MemoryPlan, plan_memory
from atropos_core.launch.plan import make_plan
from atropos_recipes.headers import Recipe, names, read
from tests.shapes import SHAPES, write_shape

MADE_FROM = {"Qwen3-8B-nf4": "Qwen/Qwen3-8B"}  # a directory that a command writes -> the model that it is made from
CLUSTERS = ("slurm", "ray")
PROBLEMS = '{"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\\n#### 5"}\n'
NOT_INSTALLED = {"textarena": "gsm8k"}  # an environment that the tests of core do not have -> one in its place


def prepare(folder: Path) -> Path:
    """Write what the flags of `arguments` name, and return the folder."""
    for model in SHAPES:
        write_shape(model, stand_in(model, folder))
    (folder / "gsm8k").mkdir()
    for split in ("train", "test"):
        (folder / "gsm8k" / f"{split}.jsonl").write_text(PROBLEMS)
    return folder


def arguments(recipe: Recipe, folder: Path) -> list[str]:
    """Return the flags with which a recipe needs no hub: stand-ins of the shape of its models, and a file in place of GSM8K."""
    data = folder / "gsm8k"
    values = read_file(recipe.path).values
    flags = ["--model", str(stand_in(recipe.model, folder))]
    for name, teacher in values.get("teacher", {}).items():
        flags += ["--set", f"teacher.{name}.model={stand_in(teacher['model'], folder)}"]
    for name, environment in values["environment"].items():
        at, use = f"environment.{name}", environment.get("use", name)
        if other := NOT_INSTALLED.get(use):
            flags += ["--env", other]
            at, use = f"environment.{other}", other
        if use == "agent":
            at, use = f"{at}.tasks_from", environment["tasks_from"]["use"]
        if use == "gsm8k":
            flags += ["--set", f"{at}.source=path", "--set", f"{at}.path={data}"]
    if values.get("launcher", {}).get("use") == "ray":  # whose package the tests of core do not have
        flags += ["--launcher", "local"]
    return flags


def stand_in(model: str, folder: Path) -> Path:
    """Return the directory in place of a model."""
    return folder / MADE_FROM.get(model, model).replace("/", "--")


def plan_of(recipe: Recipe, folder: Path) -> MemoryPlan:
    """Plan the recipe's memory on its own hardware."""
    flags = arguments(recipe, folder)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    changes = [value for flag, value in zip(flags[::2], flags[1::2], strict=True) if flag == "--set"]
    env = [given["--env"]] if "--env" in given else None
    loaded, resolved, plugins = configure(recipe.path, model=given["--model"], env=env, changes=changes)
    return plan_memory(make_plan(loaded.config, resolved, plugins), folder / "run", recipe.devices)


def memory(recipe: Recipe, folder: Path) -> str:
    """Return the header's line: "17.2 of 25.8 GB on cuda:0, 2.3 GB of host memory, by the memory plan"."""
    if recipe.name.startswith(CLUSTERS):
        return "not planned here: each role gets what the run file asks the cluster for"
    needed, have = plan_of(recipe, folder).needed(), recipe.devices
    alike: dict[str, list[str]] = defaultdict(list)
    for device, size in sorted(needed.items()):
        if device != "cpu":
            alike[f"{size / 1e9:.1f} of {have[device] / 1e9:.1f} GB"].append(device)
    cards = [f"{size} on {devices[0]}{f' to {devices[-1]}' if devices[1:] else ''}" for size, devices in alike.items()]
    return ", ".join([*cards, f"{needed['cpu'] / 1e9:.1f} GB of host memory", "by the memory plan"])


def numbers(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"\d+\.\d", text)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for name in sys.argv[1:] or names():
            recipe = read(name)
            line = textwrap.fill(
                f"# memory:   {memory(recipe, Path(folder))}",
                118,
                subsequent_indent="#           ",
                break_long_words=False,
            )
            before, _, after = recipe.path.read_text().partition("# memory:")
            recipe.path.write_text(f"{before}{line}\n# time:{after.partition('# time:')[2]}")
            print(name, line)


if __name__ == "__main__":
    main()
