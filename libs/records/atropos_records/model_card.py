"""README.md of an exported policy: metadata for the hub (https://huggingface.co/docs/hub/model-cards), and a summary of the run for
people. It has no times or paths, so the same run gives the same card."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from atropos_core.config.run_file import to_toml
from atropos_core.storage.run_records import RunRecords, metric_rows

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PACKAGES = ("atropos-core", "torch", "transformers", "peft")
SHOWN = ("training", "sampling", "trainer", "bridge", "curriculum", "transform")  # sections of the run file, whole
NAMED = (
    "environment",
    "reward",
)  # sections of which a card has `use` and `weight`: other options hold paths, or secrets
_NOT_SHOWN = frozenset({"eval/version", "eval/failed"})
_SHARE = re.compile(r"eval/(.+/)?(accuracy|pass@)")


def hub_base(records: RunRecords) -> str | None:
    """Return the hub model that the run started from, or None for a directory or a name that a plugin knows."""
    model = str(records.config.get("model", ""))
    return model if _HUB_ID.fullmatch(model) and not Path(model).exists() else None


def evaluations(records: RunRecords) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the metrics "eval/..." of the first and the last evaluation, empty if there was none."""
    rows, _ = metric_rows(records.directory)
    found = [
        {name: value for name, value in row.items() if name.startswith("eval/") and math.isfinite(value)}
        for row in rows
    ]
    evaluated = [row for row in found if "eval/problems" in row]
    return (evaluated[0], evaluated[-1]) if len(evaluated) > 1 else ({}, evaluated[0] if evaluated else {})


def model_card(records: RunRecords, step: int, kind: str) -> str:
    """Return the card. `kind`: "model", "adapter", "merged adapter". `step`: of the checkpoint."""
    config = records.config
    names = sorted(config.get("environment", {}))
    model = str(config.get("model", "?"))
    shown = model if hub_base(records) or not Path(model).is_absolute() else f"{Path(model).name} (a local directory)"
    return "\n".join(
        [
            _metadata(records, step, kind, names),
            f"# {shown.rpartition('/')[2]}, trained on {', '.join(names) or 'tasks of workers'}",
            "",
            f"{_KINDS[kind]} after {step} steps of reinforcement learning with "
            f"Atropos on {', '.join(f'`{name}`' for name in names) or 'tasks of workers'}, "
            f"from `{shown}`.",
            "",
            *_figures(records, step),
            "## Loading it",
            "",
            "```python",
            *_loading(kind, _precision(config.get("trainer", {}))),
            "```",
            "",
            *_base_note(records, kind, model),
            "## The run",
            "",
            "```toml",
            to_toml(_shown_config(config)).strip(),
            "```",
            "",
            "Options of environments and rewards are not shown.",
            "",
            "Exported with " + ", ".join(f"{name} {number}" for name, number in _versions()) + ".",
            "",
        ]
    )


_KINDS = {
    "model": "A policy",
    "adapter": "A LoRA adapter",
    "merged adapter": "A policy, whose LoRA adapter is merged into the model,",
}


def _metadata(records: RunRecords, step: int, kind: str, names: list[str]) -> str:
    """Return YAML, with values written as JSON, which is valid YAML."""
    base = hub_base(records)
    values: dict[str, Any] = {
        "library_name": "peft" if kind == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["atropos", "reinforcement-learning", str(records.config.get("trainer", {}).get("use", "grpo"))],
    }
    if base is not None:
        values |= {"base_model": base, "base_model_relation": "adapter" if kind == "adapter" else "finetune"}
    _, after = evaluations(records)
    results = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": f"{', '.join(names)} (held out)", "type": "-".join(names)},
            "metrics": [
                {"type": name.removeprefix("eval/"), "name": name.removeprefix("eval/"), "value": round(value, 6)}
                for name, value in sorted(after.items())
                if _SHARE.match(name) or name == "eval/reward"
            ],
        }
    ]
    if step == _last_evaluated(records) and names and results[0]["metrics"]:
        values["model-index"] = [{"name": "-".join(names), "results": results}]
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join(["---", *lines, "---", ""])


def _last_evaluated(records: RunRecords) -> int | None:
    rows, _ = metric_rows(records.directory)
    return max((int(row["step"]) for row in rows if math.isfinite(row.get("eval/problems", math.nan))), default=None)


def _figures(records: RunRecords, step: int) -> Iterator[str]:
    before, after = evaluations(records)
    if not after:
        return
    yield from ("## Held-out problems", "", "| metric | before | after |", "|---|---|---|")
    for name in sorted(after.keys() - _NOT_SHOWN):
        shown = [_figure(name, row.get(name)) for row in (before, after)]
        yield f"| {name.removeprefix('eval/')} | {shown[0]} | {shown[1]} |"
    last = _last_evaluated(records)
    yield ""
    if last != step:
        yield f"The last evaluation was after step {last}; these weights are of step {step}.\n"


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if _SHARE.match(name) else f"{value:.4g}"


def _precision(trainer: Mapping[str, Any]) -> str:
    """Return the dtype in which the adapter was trained, if the run file tells. Otherwise the base's files do, which name that of their
    authors: a base in bfloat16 that was trained in float32 would be loaded as another policy."""
    dtype = str(trainer.get("dtype", "auto"))
    on_cpu = bool(trainer.get("devices")) and all(device == "cpu" for device in trainer["devices"])
    return dtype if dtype != "auto" else "float32" if on_cpu else ""


def _loading(kind: str, dtype: str) -> tuple[str, ...]:
    if kind == "adapter":
        in_dtype = f', dtype="{dtype}"' if dtype else ""
        return (
            "from peft import AutoPeftModelForCausalLM",
            "from transformers import AutoTokenizer",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("PATH_OR_ID"{in_dtype})',
            'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_ID")',
        )
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("PATH_OR_ID")',
        'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_ID")',
    )


def _base_note(records: RunRecords, kind: str, model: str) -> Iterator[str]:
    if kind == "adapter" and hub_base(records) is None:
        yield (
            "The base model is a directory of the machine that trained it, which `adapter_config.json` names: elsewhere it does "
            "not load. `atropos export --merged` writes a whole model.\n"
        )


def _shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {name: config[name] for name in ("seed", "deterministic") if name in config}
    if not Path(str(config.get("model", ""))).is_absolute():
        shown["model"] = config.get("model", "")
    for section in SHOWN:
        if section in config:
            shown[section] = _without_paths(config[section])
    for section in NAMED:
        shown[section] = {
            name: _without_paths({key: component[key] for key in ("use", "weight") if key in component})
            for name, component in config.get(section, {}).items()
        }
    return shown


def _without_paths(value: Any) -> Any:
    """Return the values with absolute paths cut to their last part."""
    if isinstance(value, Mapping):
        return {name: _without_paths(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_paths(one) for one in value]
    return value.rpartition("/")[2] if isinstance(value, str) and value.startswith(("/", "~")) else value


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
