"""Mutation testing of the losses and advantages: how many planted faults do their tests find?

    python -m benchmarks.soak_mutants

mutmut changes one operator, number or argument at a time in a copy of these modules, and runs their tests. A fault that no
test finds has survived. At least 90 % must be found. Writes benchmarks/results/soak_mutants.json, survivors by name.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from atropos_core import console
from benchmarks.machine import RESULTS, described

ROOT = Path(__file__).parents[1]
TRAINER = ROOT / "plugins/trainer_grpo"
MODULES = (
    *(
        f"atropos_trainer_grpo/losses/{name}.py"
        for name in ("averages", "clipped", "dppo", "gmpo", "kpop", "luspo", "rows", "sapo", "vespo")
    ),
    "atropos_trainer_grpo/corrections.py", "atropos_trainer_grpo/kl_estimators.py",
    "atropos_trainer_grpo/whitening.py", "atropos_core/advantages.py",
)  # fmt: skip
TESTS = {
    TRAINER / "tests/test_losses.py": "test_losses.py",
    TRAINER / "tests/test_corrections.py": "test_corrections.py",
    TRAINER / "tests/test_divergence.py": "test_divergence.py",
    TRAINER / "tests/test_whitening.py": "test_whitening.py",
    ROOT / "tests/unit/test_advantages.py": "test_group_advantages.py",
}
SETTINGS = f"""
[tool.mutmut]
source_paths = {json.dumps(MODULES)}
also_copy = ["atropos_core", "atropos_trainer_grpo"]
pytest_add_cli_args_test_selection = ["tests"]
"""
LEAST = 0.9
DEADLINE_S = 3600.0


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="atropos-mutants-") as scratch:
        stage = Path(scratch)
        shutil.copytree(ROOT / "atropos_core", stage / "atropos_core")
        shutil.copytree(TRAINER / "atropos_trainer_grpo", stage / "atropos_trainer_grpo")
        (stage / "tests").mkdir()
        for test, name in TESTS.items():
            shutil.copy(test, stage / "tests" / name)
        (stage / "pyproject.toml").write_text(SETTINGS)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

        def mutmut(*arguments: str) -> str:
            ended = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "mutmut", *arguments],
                cwd=stage, env=environment, capture_output=True, text=True, timeout=DEADLINE_S,
            )  # fmt: skip
            if ended.returncode:
                raise SystemExit(f"mutmut {arguments[0]} failed:\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
            return ended.stdout

        machine = described()
        mutmut("run", "--max-children", "2")
        states = dict(
            line.strip().split(": ") for line in mutmut("results", "--all", "true").splitlines() if ": " in line
        )
        survivors = {
            name: [line for line in mutmut("show", name).splitlines() if line[:2] in ("- ", "+ ")]
            for name, state in states.items()
            if state == "survived"
        }
    counts = Counter(states.values())
    found = 1 - counts["survived"] / max(len(states), 1)
    holds = bool(states) and found >= LEAST and not set(counts) - {"killed", "survived", "timeout"}
    console.table(("", ""), [(state, str(count)) for state, count in counts.most_common()])
    console.say(f"{100 * found:.1f} % of {len(states)} planted faults were found; {100 * LEAST:.0f} % is required")
    result = {"machine": machine, "found": found, "holds": holds, "counts": dict(counts), "survivors": survivors}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "soak_mutants.json").write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
