"""Find the policy of a run's checkpoint."""

from __future__ import annotations

from pathlib import Path

from atropos_core import console
from atropos_core.errors import RunDirectoryError
from atropos_core.storage.run_directory import RunDirectory


def checkpoint_policy(run: Path, step: int | None) -> tuple[str, int]:
    """Return the directory of a checkpoint's policy, and the checkpoint's step; without `step`, of the newest. Raises
    RunDirectoryError."""
    checkpoints = RunDirectory(run).checkpoints
    checkpoint = checkpoints.latest(console.warn) if step is None else checkpoints.at(step)
    if checkpoint is None:
        raise no_checkpoint(run)
    if not any((checkpoint.policy / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise RunDirectoryError(
            f"the checkpoints of {run} cannot be opened by an engine: {checkpoint.policy} has no config.json. The trainer `toy` "
            "saves a table that only its own run can load.",
            remedy="Its own evaluations are in metrics.jsonl (eval/...); more of them: `atropos resume` with more --steps. "
            "Runs of `--model tiny` and others can be evaluated.",
        )
    return str(checkpoint.policy), checkpoint.step


def no_checkpoint(run: Path) -> RunDirectoryError:
    """Return the error for a directory without a checkpoint, with the command that its user may have meant."""
    if (run / "config.toml").is_file():
        return RunDirectoryError(
            f"{run} has no checkpoint to evaluate.", remedy=f"Continue the run: atropos resume {console.quoted(run)}"
        )
    saved = next((one for one in (run, *run.parents) if one.name.startswith("step-")), None)
    if saved is not None and (saved.parents[1] / "config.toml").is_file():
        step = saved.name.removeprefix("step-").lstrip("0")
        return RunDirectoryError(
            f"{run} is a checkpoint, not a run directory.",
            remedy=f"atropos eval {console.quoted(saved.parents[1])} --step {step}",
        )
    if (run / "config.json").is_file() or (run / "adapter_config.json").is_file():
        return RunDirectoryError(
            f"{run} is a model, not a run directory.",
            remedy=f"atropos eval --env NAME --model {console.quoted(run)}",
        )
    return RunDirectoryError(
        f"{run} is not a run directory: it has no config.toml.", remedy="`ls -t runs` shows the newest."
    )
