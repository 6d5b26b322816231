"""The policy of a checkpoint as a directory that `from_pretrained` loads, with a model card (README.md)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from atropos_core.errors import CheckpointError, ConfigError, RunDirectoryError
from atropos_core.scripting.results import ExportedPolicy
from atropos_core.storage.atomic import WRITABLE, appearing, json_bytes, refuse_existing, size_bytes
from atropos_core.storage.checkpoint import Checkpoint
from atropos_core.storage.reading import parse_json, read_text
from atropos_core.storage.run_records import RunRecords
from atropos_records.model_card import hub_base, model_card

ADAPTER = "adapter_config.json"
ONLY_FOR_TRAINING = (
    "trainer_state.pt",
    "trainer_state",
)  # the optimizer's moments: larger than the policy, and not needed to load it

Merge = Callable[[Path, Path], None]  # merges an adapter's directory into a whole model in a new, empty directory


def checkpoint_of(records: RunRecords, step: int | None, warn: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint of this step, or the newest complete one. Raises CheckpointError."""
    checkpoints = records.run.checkpoints
    found = checkpoints.latest(warn) if step is None else checkpoints.at(step)
    if found is None:
        raise CheckpointError(
            f"{records.directory} has no checkpoint to export.",
            remedy="A run saves one at its end; checkpoint.every: before.",
        )
    return found


def export_policy(records: RunRecords, checkpoint: Checkpoint, out: Path, merge: Merge | None = None) -> ExportedPolicy:
    """Write the policy into the new directory `out`, which appears complete or not at all. With `merge`, merge an adapter into its base
    model. Raises ConfigError for a policy that is not a Hugging Face model, or is not an adapter although there is `merge`, and
    RunDirectoryError if `out` exists or cannot be written."""
    policy = checkpoint.policy
    is_adapter = (policy / ADAPTER).is_file()
    if not is_adapter and not (policy / "config.json").is_file():
        raise ConfigError(
            f"{policy} is not a policy in Hugging Face form: it has neither config.json nor {ADAPTER}.",
            remedy="This run's trainer saves its own form, which only it reads.",
        )
    if merge is not None and not is_adapter:
        raise ConfigError("--merged has no effect: this run trained the whole model.", remedy="Leave it out.")
    refuse_existing(out, what="directory")
    kind = ("merged adapter" if merge else "adapter") if is_adapter else "model"
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with appearing(out.absolute()) as partial:
            if merge is not None:
                merge(policy, partial)
            else:
                shutil.copytree(policy, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*ONLY_FOR_TRAINING))
            if kind == "adapter":
                _name_base(partial / ADAPTER, hub_base(records))
            (partial / "README.md").write_bytes(json_bytes(model_card(records, checkpoint.step, kind)))
            for path in (
                partial,
                *partial.rglob("*"),
            ):  # a run's files are private to its user; these are for others
                path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
            files = tuple(sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file()))
            size = size_bytes(partial)
    except OSError as error:
        raise RunDirectoryError(f"{out} cannot be written: {error.strerror or error}.", remedy=WRITABLE) from error
    return ExportedPolicy(out, checkpoint.step, kind, files, size)


def _name_base(path: Path, base: str | None) -> None:
    """If the base model is on the hub, make the adapter refer to it by that name instead of its folder on this machine."""
    try:
        settings = parse_json(read_text(path))
        if not isinstance(settings, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise CheckpointError(f"the adapter's {path.name} cannot be read: {error}.") from error
    if base is not None:
        settings["base_model_name_or_path"] = base
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
