"""The input of a simulation. Each figure is measured or given, and records its source; none is guessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from atropos_core.errors import ConfigError
from atropos_core.plugins.options import NoBooleanIsANumber
from atropos_core.storage.reading import parse_toml, read_text


class Section(NoBooleanIsANumber):
    model_config = ConfigDict(extra="forbid", frozen=True)


EXAMPLE = "A file has sections of figures, such as:\n[engine]\nsingle_tokens_per_s = 90\npeak_tokens_per_s = 5000"


class EngineFigures(Section):
    single_tokens_per_s: float = Field(gt=0, description="of an engine that samples only one sequence")
    peak_tokens_per_s: float = Field(gt=0, description="of one engine with as many sequences as possible")
    max_sequences: int = Field(ge=1, description="in one engine's batch; others wait")

    @model_validator(mode="after")
    def _single_is_not_faster(self) -> Self:
        if self.single_tokens_per_s > self.peak_tokens_per_s:
            raise ValueError(
                "single_tokens_per_s is above peak_tokens_per_s, but no engine is faster with one sequence than with many"
            )
        return self

    @property
    def sequence_s(self) -> float:
        return 1 / self.peak_tokens_per_s

    @property
    def step_s(self) -> float:
        return 1 / self.single_tokens_per_s - 1 / self.peak_tokens_per_s


class RolloutFigures(Section):
    tokens: tuple[int, ...] = Field(min_length=1, description="sampled in a rollout; each value is equally likely")
    turns: int = Field(ge=1, description="of a rollout; its tokens are shared among them")
    environment_s: float = Field(
        ge=0, description="after each turn: waiting for tools, graders and everything else except engines"
    )

    @property
    def mean_tokens(self) -> float:
        return sum(self.tokens) / len(self.tokens)


class WorkerFigures(Section):
    rollout_s: float = Field(ge=0, description="of a worker's processor for one rollout; it does one thing at a time")


class HubFigures(Section):
    group_s: float = Field(ge=0, description="of one server's processor for one group, from its draw to its commit")
    servers: int = Field(1, ge=1, description="that share the environments")


class TrainerFigures(Section):
    step_s: float = Field(ge=0, description="of each update, whatever its size")
    token_s: float = Field(ge=0, description="in addition for each sampled token that is trained")


class BridgeFigures(Section):
    publish_s: float = Field(ge=0, description="of each publication, without its transfer; engines are paused")
    bytes: float = Field(0.0, ge=0, description="that each engine receives")
    bytes_per_s: float | None = Field(None, gt=0, description="of the link; may be unset only if bytes is 0")
    at_once: bool = Field(True, description="true: to all engines at once; false: one after another, through one link")

    @model_validator(mode="after")
    def _check_link(self) -> Self:
        if self.bytes and self.bytes_per_s is None:
            raise ValueError("bytes is set but bytes_per_s is not: give the speed of the link")
        return self

    def seconds(self, engines: int) -> float:
        transfer = self.bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return self.publish_s + transfer * (1 if self.at_once else engines)


class LoopFigures(Section):
    step_s: float = Field(ge=0, description="of each step, without waiting, update and publication")
    group_s: float = Field(ge=0, description="in addition for each group: transforms, packing, sinks")


class RunFigures(Section):
    groups_per_step: int = Field(ge=1)
    group_size: int = Field(ge=1)
    max_staleness: int = Field(ge=0)
    refill_rounds: int = Field(0, ge=0)
    kept_share: float = Field(gt=0, le=1, description="of groups, that the transforms keep for training")


class FailureFigures(Section):
    process_mtbf_s: float = Field(gt=0, description="mean time between failures of one process, engine or trainer")
    restart_s: float = Field(ge=0, description="from a failure until the run continues from its checkpoint")
    checkpoint_every_s: float = Field(gt=0, description="work between two checkpoints, which a failure loses")
    checkpoint_s: float = Field(ge=0, description="of a checkpoint, during which nothing else runs")


class Figures(Section):
    run: RunFigures
    engine: EngineFigures
    rollout: RolloutFigures
    worker: WorkerFigures
    hub: HubFigures
    trainer: TrainerFigures
    bridge: BridgeFigures
    loop: LoopFigures
    failures: FailureFigures | None = Field(None, description="unset: nothing fails")


@dataclass(frozen=True)
class Known:
    """Known figures by section and name, each with its source. `over` lets one set take precedence over another."""

    values: Mapping[str, Any]  # "engine.peak_tokens_per_s" -> 5000.0
    origins: Mapping[str, str]
    notes: Mapping[str, str]  # for a missing figure: the reason, and how to measure it

    def over(self, other: Known) -> Known:
        return Known({**other.values, **self.values}, {**other.origins, **self.origins}, {**other.notes, **self.notes})

    def figures(self) -> Figures:
        """Return validated figures. Raises ConfigError for missing or invalid ones."""
        sections: dict[str, dict[str, Any]] = {}
        for path, value in self.values.items():
            section, _, name = path.partition(".")
            sections.setdefault(section, {})[name] = value
        try:
            return Figures.model_validate(
                {name: {} for name, one in Figures.model_fields.items() if one.is_required()} | sections
            )
        except ValidationError as error:
            raise self._refused(error) from None

    def _refused(self, error: ValidationError) -> ConfigError:
        missing, wrong = [], []
        for one in error.errors():
            path = ".".join(map(str, one["loc"][:2]))
            if one["type"] == "missing":
                missing.append(f"  {path}: {self.notes.get(path) or description(path)}")
            else:
                wrong.append(f"  {path} = {one['input']!r}: {one['msg'].removeprefix('Value error, ')}")
        if wrong:
            return ConfigError(
                "these figures are not valid:\n" + "\n".join(wrong), remedy=f"The sections are {', '.join(_SECTIONS)}."
            )
        return ConfigError(
            "these figures are missing, and they have no default:\n" + "\n".join(missing),
            remedy="Give them: --set " + f"{missing[0].split(':')[0].strip()}=VALUE, or in the TOML file of --figures.",
        )


def description(path: str) -> str:
    """Return the description of a figure's field, or "" for an unknown figure."""
    section, _, name = path.partition(".")
    annotation = _SECTIONS.get(section)
    field = annotation.model_fields.get(name) if annotation else None
    return (field.description or "") if field else ""


_SECTIONS: Mapping[str, type[Section]] = {
    "run": RunFigures, "engine": EngineFigures, "rollout": RolloutFigures, "worker": WorkerFigures, "hub": HubFigures,
    "trainer": TrainerFigures, "bridge": BridgeFigures, "loop": LoopFigures, "failures": FailureFigures,
}  # fmt: skip


def from_file(path: Path) -> Known:
    """Read figures from a TOML file. Raises ConfigError."""
    try:
        sections = parse_toml(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}", remedy=EXAMPLE) from error
    loose = [name for name, section in sections.items() if not isinstance(section, dict)]
    if loose:
        raise ConfigError(f"{path}: {loose[0]} is not in a section.", remedy=EXAMPLE)
    values = {f"{section}.{name}": value for section, inside in sections.items() for name, value in inside.items()}
    return Known(values, dict.fromkeys(values, str(path)), {})


def from_settings(settings: Iterable[str]) -> Known:
    """Read settings such as `engine.peak_tokens_per_s=5000`, with TOML values. Raises ConfigError."""
    values: dict[str, Any] = {}
    for one in settings:
        name, separator, text = one.partition("=")
        try:
            values[name.strip()] = parse_toml(f"value = {text}")["value"]
        except ValueError:
            separator = ""
        if not separator or "." not in name:
            raise ConfigError(f"--set {one}: not SECTION.FIGURE=VALUE.", remedy="For example: --set hub.group_s=0.0005")
    return Known(values, dict.fromkeys(values, "--set"), {})
