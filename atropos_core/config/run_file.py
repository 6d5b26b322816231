"""A run file (TOML), flags and presets -> one validated RunConfig, with the origin of every value.

Layers, the later over the earlier: defaults, the model's preset, the run file, flags. A component's section is
`use = "name"` and that component's own options, which its provider validates. Of the sections in NAMED, each layer adds the components
that it names to those of the layers below.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from atropos_core import console
from atropos_core.config.component import Component, ComponentOnDevices, RewardComponent, TrainerComponent, Weighted
from atropos_core.config.error_text import NAMED as NAMED
from atropos_core.config.error_text import explain
from atropos_core.config.health_options import HealthSection
from atropos_core.errors import ConfigError, DataError
from atropos_core.group_schema import RUN_PARTS, check_sampling, check_temperature
from atropos_core.guards.patience import Patience
from atropos_core.plugins.option_numbers import NoBooleanIsANumber
from atropos_core.plugins.option_paths import AbsolutePath, WrittenIn
from atropos_core.storage.reading import parse_toml, read_text
from atropos_core.types import Sampling


class Section(NoBooleanIsANumber):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class EngineComponent(ComponentOnDevices):
    replica: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="further engines beside this one: each [engine.replica.NAME] says only what is different about it "
        "(devices, options)",
    )

    def instances(self) -> dict[str, ComponentOnDevices]:
        """Every engine of the run by its path in the run file."""
        base = {key: value for key, value in self.model_dump().items() if key != "replica"}
        made = {"engine": ComponentOnDevices.model_validate(base)}
        for name, different in self.replica.items():
            if "use" in different or "replica" in different:
                raise ValueError(
                    f"engine.replica.{name} says only what differs from [engine]; `use` is the same for all"
                )
            try:
                made[f"engine.replica.{name}"] = ComponentOnDevices.model_validate({**base, **different})
            except ValidationError as error:
                raise ValueError(explain(error, ComponentOnDevices, {}, f"engine.replica.{name}.")) from error
        urls = [one.options["url"] for one in made.values() if one.options.get("url")]
        if len(urls) != len(set(urls)):
            raise ValueError(f"two engines of the run have one url, {urls[0]}: give each replica its own")
        return made


def checked_temperature(value: float) -> float:
    """Raises ValueError."""
    try:
        check_temperature("a temperature", value)
    except DataError as error:
        raise ValueError(Exception.__str__(error)) from None
    return value


Temperature = Annotated[float, AfterValidator(checked_temperature)]


def greedy_is_not_cut(section: str, temperature: float, top_p: float, top_k: int) -> None:
    """Raises ValueError: the likeliest token is the same whatever else is cut away."""
    if temperature == 0 and (top_p, top_k) != (1.0, 0):
        idle = "top_p" if top_p != 1.0 else "top_k"
        raise ValueError(
            f"{section}.{idle} has no effect at {section}.temperature = 0, where the likeliest token is taken: remove it, or "
            "raise the temperature"
        )


class SamplingSection(Section):
    max_tokens: int = Field(256, ge=1, description="longest reply, in tokens")
    temperature: Temperature = Field(
        1.0,
        description="0.01 to 100, where 1 leaves the policy's distribution as it is; 0, greedy, is for [evaluation] "
        "alone",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample from the likeliest tokens that make up this part of the probability; 1: from all",
    )
    top_k: int = Field(0, ge=0, description="sample from so many of the likeliest tokens; 0: from all")

    stop: tuple[str, ...] = Field(
        (), description="texts at which a reply ends, also in evaluations; the text stays in the reply and its tokens"
    )

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        try:
            check_sampling(Sampling(stop=stop))
        except DataError as error:
            raise ValueError(Exception.__str__(error)) from None
        return stop

    @model_validator(mode="after")
    def _greedy_is_not_cut(self) -> SamplingSection:
        greedy_is_not_cut("sampling", self.temperature, self.top_p, self.top_k)
        return self

    def record(self) -> Sampling:
        return Sampling(**self.model_dump())


class TrainingSection(Section):
    """The shape of a run."""

    steps: int = Field(100, ge=0, description="updates of the policy; 0: none")
    groups_per_step: int = Field(16, ge=1, description="tasks whose rollouts make one batch")
    group_size: int = Field(8, ge=1, description="rollouts of one task")
    min_group: int = Field(1, ge=1, description="a group with fewer rollouts that ended is dropped")
    max_staleness: int = Field(
        0, ge=0, description="policy versions that a trained token may be behind; 0 is strictly on-policy"
    )
    refill_rounds: int = Field(
        0, ge=0, description="how often a step runs more tasks in place of groups that a transform dropped"
    )
    rollout_deadline_s: float = Field(
        300.0, gt=0, description="seconds for one rollout, after which it counts as failed"
    )
    max_logprob_diff: float | None = Field(
        None,
        gt=0,
        description="the largest difference between engine and trainer, in nats; the run stops above it. Unset: 0.5 for 16-bit "
        "weights; for float32 ones 1e-4, or 4 times the model's own rounding if that is larger",
    )


class EvaluationSection(Section):
    problems: int = Field(512, ge=0, description="tasks of the held-out split; 0: never evaluate")
    every: int = Field(
        0, ge=0, description="steps between evaluations; 0: before the first step and after the last alone"
    )
    samples: int = Field(1, ge=1, description="rollouts of each problem")
    pass_at: tuple[int, ...] | None = Field(
        None, description="the k of pass@k, each at most `samples`; unset: `samples`, where there are several"
    )
    temperature: Temperature = Field(
        0.0, description="as sampling.temperature; 0: the likeliest token, which goes with samples = 1"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="as sampling.top_p")
    top_k: int = Field(0, ge=0, description="as sampling.top_k")
    max_tokens: int | None = Field(None, ge=1, description="longest reply, in tokens; unset: as sampling.max_tokens")

    def sampling(self, run: Sampling) -> Sampling:
        """The sampling of evaluations, with the run's stop texts, and the run's max_tokens unless this section sets one. Greedy sampling
        is not truncated as well."""
        max_tokens = self.max_tokens or run.max_tokens
        if self.temperature == 0:
            return Sampling(max_tokens, 0.0, stop=run.stop)
        return Sampling(max_tokens, self.temperature, self.top_p, self.top_k, stop=run.stop)

    def ks(self) -> tuple[int, ...]:
        return ((self.samples,) if self.samples > 1 else ()) if self.pass_at is None else self.pass_at

    def check(self) -> None:
        """Raises ValueError where samples, temperature and pass_at do not go together."""
        greedy_is_not_cut("evaluation", self.temperature, self.top_p, self.top_k)
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"evaluation.samples = {self.samples} at evaluation.temperature = 0 would be one reply {self.samples} "
                "times: raise the temperature, e.g. to 1"
            )
        if beyond := [k for k in self.ks() if not 1 <= k <= self.samples]:
            raise ValueError(
                f"evaluation.pass_at: pass@{beyond[0]} cannot be estimated from evaluation.samples = {self.samples}: "
                "k is at least 1, and at most that"
            )


class CheckpointSection(Section):
    every: int | None = Field(
        None,
        ge=0,
        description="steps between checkpoints; 0: only at the end; unset: after the first step, then every ten seconds, or as "
        "much more seldom as keeps saving at a twentieth of the time",
    )
    keep: int = Field(2, ge=1, description="newest checkpoints that stay on disk")
    other_tasks: bool = Field(
        False, description="resume although training tasks are not those that the checkpoint was saved with"
    )

    def interval(self, steps: int) -> int:
        """In steps, for another framework's trainer, which knows no time."""
        return 50 if self.every is None else self.every or steps


class WatchSection(Section):
    """Over processes and servers that the run needs, where one owes an answer and says nothing."""

    say_s: float = Field(
        Patience.say_s,
        gt=0,
        description="seconds of silence before a line names process and call; half of it where the process is stopped",
    )
    least_s: float = Field(
        Patience.least_s, gt=0, description="seconds of silence before it is given up, and the run ends"
    )
    times: float = Field(Patience.times, ge=1, description="and so many times the longest such call before")

    def patience(self) -> Patience:
        return Patience(**self.model_dump())


class HubSection(Section):
    size_mb: float = Field(256.0, gt=0, description="megabytes that groups waiting to be trained may take")


class ApiSection(Section):
    """Where the groups come from, in place of rollouts in this process: workers at a trajectory API."""

    url: str = Field(description="address of the trajectory API (`atropos serve`), as http://HOST:PORT")
    token_file: AbsolutePath | None = Field(None, description="file with the server's token")
    engine_address: str = Field(
        "127.0.0.1:0", description="HOST:PORT where workers reach the engines of this run; port 0: any free one"
    )
    wait_s: float = Field(600.0, gt=0, description="seconds to wait for a worker of each environment, at the start")

    def token(self) -> str | None:
        return None if self.token_file is None else read_token(self.token_file)


def read_token(file: Path) -> str:
    """The token in a file. Raises ConfigError."""
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read: {error}") from error
    if not (token and token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(f"the token file {file} must hold one word of ASCII characters.")
    return token


class RunConfig(Section):
    """Everything that a run is."""

    model: str = Field(
        "tiny", description="the policy: a directory, a Hugging Face id, or a name that a plugin knows, such as tiny"
    )
    seed: int = Field(0, ge=0, description="every random number of the run derives from it")
    deterministic: bool = Field(
        False, description="the same weights, bit by bit, also across a kill and a resume (CPU)"
    )
    date: datetime.date | None = Field(
        None,
        description="the date that chat templates get when they ask for it, as 2026-01-31; unset: the day on which the run begins, "
        "also when it is resumed",
    )
    oversubscribe: bool = Field(
        False, description="start although the run does not fit by its plan of memory, or its checkpoints on the disk"
    )
    restarts: int = Field(
        0, ge=0, description="how often the run starts again from its last checkpoint when a process of it dies"
    )
    plot: Literal["auto", "always", "never"] = Field(
        "auto",
        description="plot.png at the end of the run: auto, where it took half a minute and matplotlib is installed; always; never",
    )
    training: TrainingSection = Field(TrainingSection(), description="the shape of the run: steps, groups, staleness")
    sampling: SamplingSection = Field(SamplingSection(), description="how rollouts are sampled")
    environment: dict[str, Weighted] = Field(
        default_factory=dict, description="one table an environment; the name is the default of `use`"
    )
    reward: dict[str, RewardComponent] = Field(
        default_factory=lambda: {"environment": RewardComponent(use="environment")},
        description="one table a reward, summed by weight; the name is the default of `use`. The one named environment "
        'is the environment\'s own score, to which the others are added; use = "none" leaves one out',
    )
    engine: EngineComponent = Field(EngineComponent(use="hf"), description="what samples")
    trainer: TrainerComponent = Field(TrainerComponent(use="grpo"), description="what updates the policy")
    bridge: Component = Field(Component(use="ipc"), description="how weights get from the trainer to the engine")
    launcher: Component = Field(
        Component(use="local"), description="what starts the processes of engines and trainer, and on which machines"
    )
    curriculum: Component = Field(Component(use="shuffled"), description="which task is drawn next")
    transform: dict[str, Component] = Field(
        default_factory=lambda: {name: Component(use=name) for name in ("group_advantage", "drop_flat")},
        description="what is done to scored groups, in this order; the name is the default of `use`. A new one comes first",
    )
    teacher: dict[str, Component] = Field(
        default_factory=dict,
        description="one table a teacher, whose logprobs groups are given; the name is the default of `use`",
    )
    sink: dict[str, Component] = Field(
        default_factory=lambda: {name: Component(use=name) for name in ("console", "jsonl")},
        description="where metrics and rollouts go; the name is the default of `use`",
    )
    evaluation: EvaluationSection = Field(EvaluationSection(), description="held-out evaluation")
    checkpoint: CheckpointSection = Field(CheckpointSection(), description="what a run is resumed from")
    hub: HubSection = Field(HubSection(), description="the queue of groups that wait to be trained")
    health: HealthSection = Field(
        HealthSection(), description="checks of every step, their thresholds, and what an illness does"
    )
    watch: WatchSection = Field(
        WatchSection(), description="over processes and servers that owe an answer and say nothing"
    )
    api: ApiSection | None = Field(
        None, description="groups from workers at a trajectory API, in place of rollouts in this process"
    )

    @model_validator(mode="after")
    def _agrees(self) -> RunConfig:
        if self.training.min_group > self.training.group_size:
            raise ValueError(
                f"training.min_group {self.training.min_group} is more than training.group_size {self.training.group_size}"
            )
        if taken := sorted(RUN_PARTS & self.reward.keys()):
            raise ValueError(
                f"reward.{taken[0]}: reward/{taken[0]} is a metric of the run's own, so give that reward another name"
            )
        self.engine.instances()
        self.evaluation.check()
        if self.deterministic and self.training.max_staleness:
            raise ValueError("deterministic = true needs training.max_staleness = 0: overlap depends on timing")
        if self.deterministic and self.api:
            raise ValueError(
                "deterministic = true needs rollouts in this process: with [api], workers sample when they can"
            )
        if self.api:
            self._refuse_idle_beside_an_api()
        return self

    def _refuse_idle_beside_an_api(self) -> None:
        """Raises ValueError for what has no effect where workers run the rollouts. (The tables of environments and rewards do: a worker
        may read the same file, and what is installed here is evaluated here.)"""
        if self.hub != HubSection():
            raise ValueError(
                "hub.size_mb has no effect with [api]: groups wait in the server's hub, which `atropos serve --hub-mb` bounds; "
                "remove it"
            )
        usual, given = EvaluationSection(), self.evaluation
        changed = [name for name in EvaluationSection.model_fields if getattr(given, name) != getattr(usual, name)]
        if changed and not self.environment and given.problems:
            raise ValueError(
                f"evaluation.{changed[0]} has no effect with [api] and no environment: what is named here and installed is "
                "evaluated; name it, as [environment.gsm8k] or --env gsm8k, or remove this"
            )


FLAG = "flag"
LEFT_OUT = "none"  # as `use` of a component of NAMED sections: the run is without it
SINGLE = ("engine", "trainer", "bridge", "curriculum", "launcher")


@dataclass(frozen=True)
class Loaded:
    """A configuration, and where each of its values came from."""

    config: RunConfig
    origins: Mapping[str, str] = field(default_factory=dict)  # dotted path -> "flag", a file's name, "preset of ..."

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Every value: path, value, origin."""
        for path, value in flatten(dump(self.config)):
            yield path, value, self.origins.get(path, "default")


@dataclass(frozen=True)
class Layer:
    origin: str
    values: Mapping[str, Any]
    whole: bool = False  # the saved file of a run: it has all components, and the default ones are not added to them


def load(layers: Iterable[Layer]) -> Loaded:
    """Merge, later over earlier, and validate. Raises ConfigError that names the key, its origin and the near miss."""
    defaults = RunConfig()
    merged: dict[str, Any] = {section: {"use": getattr(defaults, section).use} for section in SINGLE}
    merged |= {section: {name: {} for name in getattr(defaults, section)} for section in NAMED}
    origins: dict[str, str] = {}
    for layer in layers:
        for section in NAMED:
            named = layer.values.get(section)
            if isinstance(named, Mapping):
                merged[section] = {} if layer.whole else _in_order(section, merged[section], named, layer)
        _merge(merged, layer.values, origins, layer.origin)
        _refuse_idle_options(merged, layer)
    for section in NAMED:
        merged[section] = _named(merged[section])
    try:
        return Loaded(RunConfig.model_validate(merged), origins)
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig, origins)) from error


def read_file(path: Path) -> Layer:
    """With the places of code, `./file.py:Name`, and of models, `./directory`, from the folder of the file on."""
    try:
        return Layer(str(path), anchored(parse_toml(read_text(path)), path.parent))
    except FileNotFoundError:
        raise ConfigError(f"there is no run file {path}.") from None
    except OSError as error:
        if path.is_dir():
            resume = f"To continue the run in it: atropos resume {console.quoted(path)}"
            raise ConfigError(
                f"{path} is a directory, not a run file.", remedy=resume if (path / "config.toml").exists() else None
            ) from None
        raise ConfigError(f"the run file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the run file {path} is not text in UTF-8: {error}.",
            remedy="Save it as UTF-8; in PowerShell, `Set-Content -Encoding utf8` and no `>`.",
        ) from error
    except (ValueError, RecursionError) as error:
        what_else = "Data and code are no run files: name an environment of them with --env."
        raise ConfigError(
            f"the run file {path} is not TOML: {error}", remedy=None if path.suffix == ".toml" else what_else
        ) from error


PLACES = ("use", "loss", "score")  # keys whose value may say where code stands


def anchored(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """With the places of code, `./file.py:Name`, and of a model, `./directory`, made absolute: what is started elsewhere, a process or a
    resumed run, finds the same. Other texts know their folder, for the options that are paths."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            made[key] = anchored(value, folder)
        elif key in PLACES and isinstance(value, str) and (place := _PLACE.fullmatch(value)):
            made[key] = f"{place[1]}{(folder / Path(place[2]).expanduser()).resolve()}{place[3]}"
        elif key == "model" and isinstance(value, str) and value.startswith(("./", "../")):
            made[key] = str((folder / value).resolve())
        elif isinstance(value, str):
            made[key] = WrittenIn(value, folder)
        else:
            made[key] = value
    return made


_PLACE = re.compile(r"((?:\w+:)?)(.+\.py)((?::\w+)?)")  # of NAME:./file.py too, where a component takes a file


def parse_flag(text: str) -> tuple[str, Any]:
    """`trainer.learning_rate=1e-6` -> path and value; the value is read as TOML, and as plain text where it is none."""
    path, equals, raw = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set wants PATH=VALUE, as in --set trainer.learning_rate=1e-6; it got {text!r}.")
    try:
        value = parse_toml(f"value = {raw}")["value"]
    except ValueError:
        value = raw
    return path.strip(), value


def nest(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Dotted paths to nested tables."""
    nested: dict[str, Any] = {}
    for path, value in pairs:
        *parents, last = path.split(".")
        table = nested
        for name in parents:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{path!r}: {name!r} is a value, not a section.")
        table[last] = value
    return nested


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def dump(config: BaseModel) -> dict[str, Any]:
    """As TOML can hold it: no None."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(entry) for key, entry in value.items() if entry is not None}
        return [clean(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    cleaned: dict[str, Any] = clean(config.model_dump(mode="json"))
    return cleaned


def to_toml(values: Mapping[str, Any], prefix: str = "") -> str:
    """Tables of TOML."""
    lines = [f"{_key(key)} = {toml_value(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for key, table in values.items():
        if isinstance(table, Mapping):
            path = f"{prefix}{_key(key)}"
            body = to_toml(table, f"{path}.")
            lines.append(f"\n[{path}]\n{body}".rstrip())
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """One value; inside a list, tables are inline. Strings are JSON strings, which TOML's basic strings contain."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, list):
        return f"[{', '.join(toml_value(entry) for entry in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {toml_value(entry)}' for key, entry in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def left_out(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The default components that a configuration is without, by section, as a run file says it."""
    defaults = RunConfig()
    return {
        section: {
            name: {"use": LEFT_OUT} for name in getattr(defaults, section) if name not in getattr(config, section)
        }
        for section in NAMED
    }


def _in_order(section: str, there: Mapping[str, Any], named: Mapping[str, Any], layer: Layer) -> dict[str, Any]:
    """The components of a section and those that a layer names. New ones come first, so that a transform of rewards is before the one that
    makes advantages of them. A file, unlike flags, also says the order of those that it names. Raises ConfigError for a component to leave
    out that is not there."""
    new = [name for name in named if name not in there]
    for name in new:
        if _is_left_out(named[name]):
            raise ConfigError(
                f"{section}.{name} cannot be left out (from {layer.origin}): there is no {section} of that name.",
                remedy=f"The run has: {', '.join(there)}." if there else f"The run has no {section}; remove this.",
            )
    order = [*new, *there]
    if layer.origin != FLAG:
        in_turn = iter(named)
        order = [next(in_turn) if name in named else name for name in order]
    return {name: there.get(name, {}) for name in order}


def _refuse_idle_options(merged: Mapping[str, Any], layer: Layer) -> None:
    """Raises ConfigError for options of a component that is left out."""
    for section in NAMED:
        named = layer.values.get(section)
        for name, table in named.items() if isinstance(named, Mapping) else ():
            if _is_left_out(merged[section][name]) and (idle := [key for key in table if key != "use"]):
                raise ConfigError(
                    f'{section}.{name}.{idle[0]} has no effect (from {layer.origin}): {section}.{name} is left out, by use = "none".',
                    remedy=f"Remove one of the two, or name the component: {section}.{name}.use={name}.",
                )


def _is_left_out(table: Any) -> bool:
    return isinstance(table, Mapping) and table.get("use") == LEFT_OUT


def _named(value: Any) -> Any:
    """In `[environment.gsm8k]` the name is the default of `use`."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: {"use": name, **entry} if isinstance(entry, Mapping) else entry
        for name, entry in value.items()
        if not _is_left_out(entry)
    }


def _merge(
    into: dict[str, Any], values: Mapping[str, Any], origins: dict[str, str], origin: str, prefix: str = ""
) -> None:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            if prefix == "" and key in SINGLE and value.get("use", into[key].get("use")) != into[key].get("use"):
                into[key] = {}  # another component: the former one's options mean nothing to it
            _merge(into[key], value, origins, origin, f"{path}.")
        elif isinstance(value, Mapping):
            into[key] = {}
            _merge(into[key], value, origins, origin, f"{path}.")
        else:
            into[key] = value
            origins[path] = origin


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)
