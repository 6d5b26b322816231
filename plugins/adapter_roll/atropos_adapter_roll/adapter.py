"""The adapter `roll`: write files for ROLL, check what is installed, and run an episode."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_adapter_kit.versions import installed_version
from atropos_adapter_roll import signatures
from atropos_adapter_roll.config import AdapterOptions
from atropos_adapter_roll.recipe import MANAGERS, whole
from atropos_adapter_roll.trial import TRIAL, Stock, right_replies
from atropos_core.config.run_file import RunConfig
from atropos_core.errors import AtroposError, FitError
from atropos_core.interfaces import Adapter, Finding
from atropos_core.plugins.provider import RunContext
from atropos_core.plugins.requirements import cuda_devices

TESTED = {"gem-llm": ("0.1.0", "0.0.4"), "ray": ("2.56.0",)}
SCRIPT = """#!/usr/bin/env bash
# Trains in ROLL with the roll.yaml next to this file. ROLL is a checkout of alibaba/ROLL, unmodified.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${ROLL:?set ROLL to the directory of a checkout of alibaba/ROLL}"
export PYTHONPATH="$ROLL${PYTHONPATH:+:$PYTHONPATH}"
python -c 'from atropos_adapter_roll.managers import MANAGER'
exec python "$ROLL/examples/start_agentic_pipeline.py" \\
  --config_path "$(realpath --relative-to="$ROLL/examples" "$here")" --config_name roll "$@"
"""


class RollAdapter(Adapter):
    def __init__(self, options: AdapterOptions, context: RunContext) -> None:
        self._options = options
        self._model = str(context.model)

    def export(self, run: RunConfig, out: Path) -> list[Path]:
        """Write `roll.yaml` and `run.sh` into `out`, over older ones. Raises ConfigError for settings that ROLL cannot take over."""
        self._options.refuse_for("an export: only `atropos adapter roll doctor` runs it", "trial_environment")
        manager, _ = MANAGERS[self._options.manager]
        out.mkdir(parents=True, exist_ok=True)
        written = [out / "roll.yaml", out / "run.sh"]
        config = whole(run, self._options, self._model)
        for path, text in zip(written, (config, SCRIPT.replace("MANAGER", manager)), strict=True):
            path.write_text(text)
        written[1].chmod(0o755)
        return written

    def versions(self) -> Mapping[str, str]:
        """The versions of the packages involved, if installed."""
        found = {"python": platform.python_version()}
        for name in ("atropos-core", "atropos-plugin-adapter-roll", "gem-llm", "ray", "torch", "vllm", "transformers"):
            if (known := installed_version(name)) is not None:
                found[name] = known
        return found

    def doctor(self) -> Sequence[Finding]:
        """Raises ConfigError for options that only an export uses."""
        finished = {"trial_environment"} | ({"max_turns"} if self._options.trial_environment else set())
        self._options.refuse_for("`atropos adapter roll doctor`", *(AdapterOptions.model_fields.keys() - finished))
        return [check_python(), *(check_package(name) for name in TESTED), *check_roll(), check_gpus(), self._trial()]

    def _trial(self) -> Finding:
        """Run one episode through gem's real classes."""
        subject = "an episode"
        try:
            import gem

            import atropos_adapter_roll.env  # noqa: F401 - registers
        except ImportError as error:
            return Finding(subject, False, f"gem does not import: {error}", "pip install gem-llm==0.1.0 (Python 3.11)")
        name = self._options.trial_environment or TRIAL
        try:
            env: Any = gem.make(
                "atropos", environment=name, max_steps=self._options.max_turns if name != TRIAL else None
            )
            try:
                steps, reward = run_once(env)
                failed = env.record()["failed"]
            finally:
                env.close()
        except AtroposError as error:
            return Finding(subject, False, f"{name}: {Exception.__str__(error)}", error.remedy or "See the error.")
        detail = f"{name} by gem.make: {steps} replies, reward {reward:g}"
        if failed:
            return Finding(subject, False, f"{name}: {failed}", "Run `atropos check` on the environment.")
        right = name != TRIAL or reward == 1.0
        return Finding(subject, right, detail, "" if right else "The right replies must earn 1: reinstall the adapter.")


def run_once(env: Any) -> tuple[int, float]:
    """Give the right replies to the trial environment; to any other one a guess each turn."""
    _, info = env.reset(seed=0)
    tasks = {task.id: task for task in Stock().tasks("train")}
    task = tasks.get(info["atropos"]["task"]) if env.options.environment == TRIAL else None
    replies = right_replies(task) if task is not None else []
    steps, total, over = 0, 0.0, False
    while not over:
        _, reward, over, _, _ = env.step(replies[steps] if steps < len(replies) else "0")
        steps, total = steps + 1, total + reward
    return steps, total


def check_python() -> Finding:
    fine = sys.version_info[:2] in ((3, 10), (3, 11))
    remedy = "" if fine else "gem-llm 0.1.0 needs Python 3.11 or older: use 3.11."
    return Finding("python", True if fine else None, platform.python_version(), remedy)


def check_package(name: str) -> Finding:
    found, tested = installed_version(name), TESTED[name]
    if found is None:
        return Finding(name, False if name == "gem-llm" else None, "not installed", f"pip install {name}=={tested[0]}")
    if found in tested:
        return Finding(name, True, found)
    return Finding(name, None, found, f"Tested with {' and '.join(tested)}; others may work.")


def check_roll() -> list[Finding]:
    """Check if an episode goes through ROLL's env managers, with our additions, and how this ROLL differs from the known one."""
    if installed_version("roll") is not None:
        detail = f"the installed distribution `roll` {installed_version('roll')} is a web framework, not alibaba/ROLL"
        return [Finding("ROLL", False, detail, "pip uninstall roll, and put a checkout of alibaba/ROLL on PYTHONPATH.")]
    try:
        from atropos_adapter_roll import managers
    except ImportError as error:
        return [Finding("ROLL", False, f"its env managers do not import: {error}", "Install ROLL's requirements.")]
    if importlib.util.find_spec("roll") is None:
        detail = "there is no module 'roll'"
        return [Finding("ROLL", None, detail, "Put a checkout of alibaba/ROLL on PYTHONPATH.")]
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.chdir(elsewhere):  # ROLL logs into ./output
        finished = [_run_through(name) for name in managers.BASES]
        differs = signatures.differences()
    message = f"as known of {signatures.KNOWN_AS_OF}" if not differs else "; ".join(differs)
    remedy = f"ROLL {signatures.KNOWN_AS_OF} is known: others may work; check what is named here." if differs else ""
    return [*finished, Finding("ROLL's interfaces", None if differs else True, message, remedy)]


def _run_through(name: str) -> Finding:
    """Never raises: any exception comes from ROLL's code, of whatever version."""
    from atropos_adapter_roll import managers
    from atropos_adapter_roll.through_roll import a_ray, run_through

    subject, tested = (
        f"ROLL's {name}",
        f"ROLL {signatures.KNOWN_AS_OF} is known: others may work; check what is named here.",
    )
    try:
        getattr(managers, name)
    except FitError as error:
        return Finding(subject, None, f"this ROLL has none: {Exception.__str__(error)}", tested)
    except Exception as error:  # noqa: BLE001 - the boundary to ROLL's code
        return Finding(
            subject, False, f"does not import: {type(error).__name__}: {error}", "Install ROLL's requirements."
        )
    try:
        with a_ray():
            steps, score = run_through(name)
    except Exception as error:  # noqa: BLE001 - the boundary to ROLL's code
        return Finding(subject, False, f"ran no episode: {type(error).__name__}: {error}", tested)
    where = next(iter(getattr(importlib.import_module("roll"), "__path__", ["?"])), "?")
    remedy = "" if score == 1.0 else f"The right replies must earn 1: {tested}"
    return Finding(subject, score == 1.0, f"{steps} replies, score {score:g}; from {where}", remedy)


def check_gpus() -> Finding:
    count = cuda_devices()
    remedy = "" if count else "ROLL trains and samples on GPUs; environments and this check do not need one."
    return Finding("GPU", True if count else None, f"{count} CUDA devices to use", remedy)
