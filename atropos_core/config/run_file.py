"""A run file (TOML), flags and presets -> one validated RunConfig, with the origin of every value.

Layers, each overriding the one before: defaults, rules that follow the model, its preset, the run file, flags. A component's section is
`use = "name"` and that component's own options, which its provider validates. In the sections of NAMED, each layer adds the
components that it names.
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
from atropos_core.config.component import (
    Component,
    ComponentOnDevices,
    GoldOptions,
    RunReward,
    TrainerComponent,
    Weighted,
)
from atropos_core.config.error_text import NAMED as NAMED
from atropos_core.config.error_text import explain
from atropos_core.config.health_options import HealthSection
from atropos_core.errors import ConfigError, DataError
from atropos_core.group_schema import RUN_PARTS, check_sampling, check_temperature
from atropos_core.guards.patience import Patience
from atropos_core.plugins.option_paths import AbsolutePath, WrittenIn
from atropos_core.plugins.options import NoBooleanIsANumber
from atropos_core.storage.reading import parse_toml, read_text
from atropos_core.types import MOST_KEPT, Sampling


class Section(NoBooleanIsANumber):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class EngineComponent(ComponentOnDevices):
    replica: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="more engines: each [engine.replica.NAME] gives only the options that differ from [engine], not `use`",
    )

    def instances(self) -> dict[str, ComponentOnDevices]:
        """Return every engine of the run by its path in the run file."""
        base = {key: value for key, value in self.model_dump().items() if key != "replica"}
        made = {"engine": ComponentOnDevices.model_validate(base)}
        for name, different in self.replica.items():
            if "use" in different or "replica" in different:
                raise ValueError(
                    f"engine.replica.{name} may only list what differs from [engine]; `use` is the same for all"
                )
            try:
                made[f"engine.replica.{name}"] = ComponentOnDevices.model_validate({**base, **different})
            except ValidationError as error:
                raise ValueError(explain(error, ComponentOnDevices, {}, f"engine.replica.{name}.")) from error
        urls = [one.options["url"] for one in made.values() if one.options.get("url")]
        if len(urls) != len(set(urls)):
            raise ValueError(f"two engines of the run have the same url, {urls[0]}: give each replica its own")
        return made


def checked_temperature(value: float) -> float:
    """Return `value` if it is a valid temperature, else raise ValueError."""
    try:
        check_temperature("a temperature", value)
    except DataError as error:
        raise ValueError(Exception.__str__(error)) from None
    return value


Temperature = Annotated[float, AfterValidator(checked_temperature)]


def refuse_cut_greedy(section: str, temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    """Raises ValueError for top_p, top_k or min_p at temperature 0: the likeliest token is the same with or without them."""
    if temperature == 0 and (top_p, top_k, min_p) != (1.0, 0, 0.0):
        idle = "top_p" if top_p != 1.0 else "top_k" if top_k else "min_p"
        raise ValueError(
            f"{section}.{idle} has no effect at {section}.temperature = 0, where the likeliest token is taken: remove it, or "
            "raise the temperature"
        )


class SamplingSection(Section):
    max_tokens: int = Field(256, ge=1, description="longest reply, in tokens")
    temperature: Temperature = Field(
        1.0,
        description="0.01 to 100; 1 leaves the policy's distribution as it is; 0, greedy, is only for [evaluation]",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description=f"sample from the likeliest tokens that together have this probability, at most {MOST_KEPT}; 1: from all",
    )
    top_k: int = Field(
        0,
        ge=0,
        le=MOST_KEPT,
        description=f"sample from this many of the likeliest tokens, at most {MOST_KEPT}; 0: from all",
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="sample from tokens with at least this share of the likeliest one's probability, at most "
        f"{MOST_KEPT} tokens; 0: from all",
    )

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
    def _refuse_cut_greedy(self) -> SamplingSection:
        refuse_cut_greedy("sampling", self.temperature, self.top_p, self.top_k, self.min_p)
        return self

    def record(self) -> Sampling:
        return Sampling(**self.model_dump())


class TrainingSection(Section):
    """Steps, groups and staleness of a run."""

    steps: int = Field(100, ge=0, description="updates of the policy; 0: none")
    groups_per_step: int = Field(16, ge=1, description="tasks whose rollouts make one batch")
    group_size: int = Field(8, ge=1, description="rollouts of one task")
    min_group: int = Field(1, ge=1, description="a group with fewer finished rollouts is dropped")
    max_staleness: int = Field(
        0, ge=0, description="policy versions that a trained token may be behind; 0 is strictly on-policy"
    )
    refill_rounds: int = Field(
        0, ge=0, description="how often a step may run more tasks to replace groups that a transform dropped"
    )
    rollout_deadline_s: float = Field(
        300.0, gt=0, description="seconds for one rollout, after which it counts as failed"
    )
    max_logprob_diff: float | None = Field(
        None,
        gt=0,
        description="the largest difference between engine and trainer, in nats; above it the run stops. Unset: 0.5 for 16-bit "
        "weights; for float32 1e-4, or 4 times the model's own rounding error if that is larger",
    )


class WarmupSection(Section):
    """A warm start: supervised steps on rows with completions, before the first update by rewards."""

    data: AbsolutePath = Field(
        description="rows: a file, a folder or a pattern, each row with a prompt and a completion, or with messages"
    )
    prompt: str = Field("prompt", description="the column with the prompt: text, or messages")
    completion: str = Field("completion", description="the column with the reply: text, or messages")
    epochs: int | None = Field(None, ge=1, description="passes over the rows; unset: 3, unless `steps` is set")
    steps: int | None = Field(None, ge=1, description="supervised steps, instead of `epochs`")
    rows_per_step: int = Field(8, ge=1, description="rows that make one batch, and one update")
    held_out: int | None = Field(
        None,
        ge=0,
        description="rows that are not trained, and whose loss is measured; unset: a tenth of them, at most 64",
    )
    max_tokens: int | None = Field(
        None,
        ge=2,
        description="rows with more tokens are left out, and named; unset: 512 + sampling.max_tokens, as memory is planned",
    )
    learning_rate: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="the highest; unset: the trainer's own for supervised steps"
    )
    rise: float = Field(
        0.1, ge=0, lt=1, description="share of the steps in which the learning rate rises linearly to its highest value"
    )
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="how the learning rate falls to 0 after that"
    )

    @model_validator(mode="after")
    def _has_one_length(self) -> WarmupSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("warmup.epochs has no effect with warmup.steps: remove one of them")
        return self


class EvaluationSection(Section):
    problems: int = Field(512, ge=0, description="tasks of the held-out split; 0: never evaluate")
    every: int = Field(
        0, ge=0, description="steps between evaluations; 0: only before the first step and after the last"
    )
    samples: int = Field(1, ge=1, description="rollouts of each problem")
    pass_at: tuple[int, ...] | None = Field(
        None, description="the k of pass@k, each at most `samples`; unset: `samples`, if that is above 1"
    )
    temperature: Temperature = Field(
        0.0, description="as sampling.temperature; 0: the likeliest token, which needs samples = 1"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="as sampling.top_p")
    top_k: int = Field(0, ge=0, le=MOST_KEPT, description="as sampling.top_k")
    min_p: float = Field(0.0, ge=0, le=1, description="as sampling.min_p")
    max_tokens: int | None = Field(None, ge=1, description="longest reply, in tokens; unset: as sampling.max_tokens")

    def sampling(self, run: Sampling) -> Sampling:
        """Return the sampling of evaluations: this section's, with the run's stop texts, and the run's max_tokens unless set here.
        At temperature 0, top_p, top_k and min_p are ignored."""
        max_tokens = self.max_tokens or run.max_tokens
        if self.temperature == 0:
            return Sampling(max_tokens, 0.0, stop=run.stop)
        return Sampling(max_tokens, self.temperature, self.top_p, self.top_k, stop=run.stop, min_p=self.min_p)

    def ks(self) -> tuple[int, ...]:
        return ((self.samples,) if self.samples > 1 else ()) if self.pass_at is None else self.pass_at

    def check(self) -> None:
        """Raises ValueError if samples, temperature and pass_at contradict each other."""
        refuse_cut_greedy("evaluation", self.temperature, self.top_p, self.top_k, self.min_p)
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
        description="steps between checkpoints; 0: only at the end; unset: after the first step, then every 10 s, or less often, so "
        "that saving takes at most 5 % of the time",
    )
    keep: int = Field(2, ge=1, description="newest checkpoints that stay on disk")
    other_tasks: bool = Field(
        False, description="resume although the training tasks differ from those that the checkpoint was saved with"
    )

    def interval(self, steps: int) -> int:
        """Return an interval in steps for another framework's trainer, which cannot save by time."""
        return 50 if self.every is None else self.every or steps


class WatchSection(Section):
    """Limits for a process or server that the run needs and that does not answer."""

    say_s: float = Field(
        Patience.say_s,
        gt=0,
        description="seconds of silence before a line names the process and the call; half of that if the process is stopped",
    )
    least_s: float = Field(
        Patience.least_s,
        gt=0,
        description="seconds of silence after which the run gives up on it, unless `times` allows more",
    )
    times: float = Field(
        Patience.times,
        ge=1,
        description="allow silence of this multiple of the longest earlier call of the same kind, if that is more than least_s",
    )

    def patience(self) -> Patience:
        return Patience(**self.model_dump())


class HubSection(Section):
    size_mb: float = Field(256.0, gt=0, description="megabytes that groups waiting to be trained on may take")


class ApiSection(Section):
    """A trajectory API, whose workers run the rollouts instead of this process."""

    url: str = Field(description="address of the trajectory API (`atropos serve`), as http://HOST:PORT")
    token_file: AbsolutePath | None = Field(None, description="file with the server's token")
    engine_address: str = Field(
        "127.0.0.1:0", description="HOST:PORT where workers reach the engines of this run; port 0: any free one"
    )
    wait_s: float = Field(600.0, gt=0, description="seconds to wait at the start for a worker of each environment")

    def token(self) -> str | None:
        return None if self.token_file is None else read_token(self.token_file)


def read_token(file: Path) -> str:
    """Return the token in a file. Raises ConfigError."""
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read: {error}") from error
    if not (token and token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(f"the token file {file} must hold one word of ASCII characters.")
    return token


class RunConfig(Section):
    """All settings of a run."""

    model: str = Field(
        "tiny", description="the policy: a directory, a Hugging Face id, or a name that a plugin knows, such as tiny"
    )
    seed: int = Field(0, ge=0, description="seed of all random numbers of the run")
    deterministic: bool = Field(
        False, description="give bit-identical weights for the same seed, also after a kill and a resume (CPU)"
    )
    date: datetime.date | None = Field(
        None,
        description="the date for chat templates that ask for it, as 2026-01-31; unset: the day on which the run begins, "
        "also when it is resumed",
    )
    oversubscribe: bool = Field(
        False, description="start even if the plan says that memory, or the disk for checkpoints, is too small"
    )
    restarts: int = Field(
        0, ge=0, description="how often the run restarts from its last checkpoint after one of its processes died"
    )
    plot: Literal["auto", "always", "never"] = Field(
        "auto",
        description="plot.png at the end of the run: auto (if it took half a minute and matplotlib is installed), always, never",
    )
    training: TrainingSection = Field(TrainingSection(), description="the shape of the run: steps, groups, staleness")
    sampling: SamplingSection = Field(SamplingSection(), description="sampling of rollouts")
    environment: dict[str, Weighted] = Field(
        default_factory=dict, description="one table per environment; the name is the default of `use`"
    )
    reward: dict[str, RunReward] = Field(
        default_factory=lambda: {"environment": RunReward(use="environment")},
        description="one table per reward, added up by weight; the name is the default of `use`. The reward named environment "
        'is the environment\'s own score, to which the others are added; use = "none" leaves one out',
    )
    engine: EngineComponent = Field(EngineComponent(use="hf"), description="samples from the policy")
    trainer: TrainerComponent = Field(TrainerComponent(use="grpo"), description="updates the policy")
    bridge: Component = Field(Component(use="ipc"), description="moves the weights from the trainer to the engines")
    launcher: Component = Field(
        Component(use="local"), description="starts the processes of engines and trainer, and chooses their machines"
    )
    curriculum: Component = Field(Component(use="shuffled"), description="chooses which task is drawn next")
    transform: dict[str, Component] = Field(
        default_factory=lambda: {name: Component(use=name) for name in ("group_advantage", "drop_flat")},
        description="applied to scored groups, in this order; the name is the default of `use`. A new one comes first",
    )
    teacher: dict[str, Component] = Field(
        default_factory=dict,
        description="one table per teacher, which adds its logprobs to groups; the name is the default of `use`",
    )
    sink: dict[str, Component] = Field(
        default_factory=lambda: {name: Component(use=name) for name in ("console", "jsonl")},
        description="record metrics and rollouts; the name is the default of `use`",
    )
    warmup: WarmupSection | None = Field(
        None, description="a warm start: supervised steps on rows with completions, before the steps of [training]"
    )
    evaluation: EvaluationSection = Field(EvaluationSection(), description="held-out evaluation")
    checkpoint: CheckpointSection = Field(
        CheckpointSection(), description="when to save checkpoints, from which a run is resumed"
    )
    hub: HubSection = Field(HubSection(), description="the queue of groups that wait to be trained")
    health: HealthSection = Field(
        HealthSection(), description="checks of every step, their thresholds, and what happens when one is ill"
    )
    watch: WatchSection = Field(
        WatchSection(), description="when to report and give up processes and servers that do not answer"
    )
    api: ApiSection | None = Field(
        None, description="groups come from workers at a trajectory API, not from rollouts in this process"
    )

    @property
    def warmup_steps(self) -> int:
        """Supervised steps before those of [training]; 0 until the rows of a `warmup.epochs` were counted."""
        return 0 if self.warmup is None else self.warmup.steps or 0

    @property
    def all_steps(self) -> int:
        return self.warmup_steps + self.training.steps

    @property
    def gold(self) -> tuple[str, GoldOptions] | None:
        """Name and options of the gold reward; None if there is none."""
        return next(((name, one.gold) for name, one in self.reward.items() if one.gold is not None), None)

    def reward_weights(self) -> dict[str, float]:
        """Return the weight of each reward that is trained on, by its name: of all but the gold reward."""
        return {name: reward.weight for name, reward in self.reward.items() if reward.gold is None}

    @model_validator(mode="after")
    def _agrees(self) -> RunConfig:
        if self.training.min_group > self.training.group_size:
            raise ValueError(
                f"training.min_group {self.training.min_group} is more than training.group_size {self.training.group_size}"
            )
        if taken := sorted(RUN_PARTS & self.reward.keys()):
            raise ValueError(
                f"reward.{taken[0]}: reward/{taken[0]} is one of the run's own metrics; give that reward another name"
            )
        self._check_gold()
        if self.health.rolls_back:
            self._check_rollback()
        self.engine.instances()
        self.evaluation.check()
        if self.deterministic and self.training.max_staleness:
            raise ValueError("deterministic = true needs training.max_staleness = 0: overlap depends on timing")
        if self.deterministic and self.api:
            raise ValueError(
                "deterministic = true needs rollouts in this process: with [api], workers sample when they can"
            )
        if self.api and self.warmup:
            raise ValueError(
                "[warmup] is for rollouts in this process: with [api], workers would sample meanwhile. Run the warm start first, "
                "with training.steps = 0, and start from the policy that it exports"
            )
        if self.api:
            self._refuse_idle_beside_an_api()
        return self

    def _check_gold(self) -> None:
        """Raises ValueError for a gold reward that could not be compared with another one, or would leave nothing to train."""
        if self.gold is None:
            return
        (name, options), every = self.gold, [name for name, reward in self.reward.items() if reward.gold is not None]
        if len(every) > 1:
            raise ValueError(f"reward.{every[1]}.gold: reward.{name} is the gold reward already; a run has at most one")
        if len(self.reward) == 1:
            raise ValueError(
                f"reward.{name}.gold: no other reward is left to train on, because the gold reward is only measured; add a reward"
            )
        if self.reward[name].weight != 1.0:
            raise ValueError(
                f"reward.{name}.weight has no effect on the gold reward, which is never added to the others: remove it"
            )
        if options.hold_back and options.share == 1:
            raise ValueError(
                f"reward.{name}.gold.share = 1 would hold back all tasks: lower it, or set hold_back = false to train them all the same"
            )

    def _check_rollback(self) -> None:
        """Raises ValueError if no finding of this run could be answered by a rollback."""
        action = 'health.reward_hacking.action = "rollback"'
        if self.api:
            raise ValueError(
                f"{action} needs rewards in this process: with [api], workers score by their own weights; use pause"
            )
        if len(self.reward_weights()) == len(self.reward):
            raise ValueError(
                f"{action} needs a gold reward, because a canary does not say which reward is gamed; add [reward.NAME.gold], or use pause"
            )
        if len(self.reward_weights()) < 2:
            raise ValueError(
                f"{action} needs a second reward to train on once the weight of the gamed one is lower; add one, or use pause"
            )
        if self.checkpoint.every == 0:
            raise ValueError(
                f"{action} needs checkpoints to go back to, and checkpoint.every = 0 saves only the last step; raise it, or leave it out"
            )

    def _refuse_idle_beside_an_api(self) -> None:
        """Raises ValueError for settings that have no effect when workers run the rollouts. Tables of environments and rewards are
        allowed: a worker may read the same file, and environments installed here are evaluated here."""
        if self.hub != HubSection():
            raise ValueError(
                "hub.size_mb has no effect with [api]: groups wait in the server's hub, which `atropos serve --hub-mb` bounds; "
                "remove it"
            )
        usual, given = EvaluationSection(), self.evaluation
        changed = [name for name in EvaluationSection.model_fields if getattr(given, name) != getattr(usual, name)]
        if changed and not self.environment and given.problems:
            raise ValueError(
                f"evaluation.{changed[0]} has no effect with [api] and no environment: only environments that are named here and "
                "installed are evaluated; name one, as [environment.gsm8k] or --env gsm8k, or remove this"
            )


FLAG = "flag"
LEFT_OUT = "none"  # `use` of a component in a NAMED section that the run leaves out
SINGLE = ("engine", "trainer", "bridge", "curriculum", "launcher")


@dataclass(frozen=True)
class Loaded:
    """A configuration, and the origin of each value."""

    config: RunConfig
    origins: Mapping[str, str] = field(default_factory=dict)  # dotted path -> "flag", a file's name, "preset of ..."

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield every value: path, value, origin."""
        for path, value in flatten(dump(self.config)):
            yield path, value, self.origins.get(path, "default")


@dataclass(frozen=True)
class Layer:
    origin: str
    values: Mapping[str, Any]
    whole: bool = False  # a run's saved file, which lists all components: no defaults are added


def load(layers: Iterable[Layer]) -> Loaded:
    """Merge the layers and validate. Raises ConfigError that names the key, its origin and a similar key."""
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
    """Read a run file. References to code, `./file.py:Name`, and models, `./directory`, are relative to its folder."""
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
            remedy="Save it as UTF-8; in PowerShell, use `Set-Content -Encoding utf8` instead of `>`.",
        ) from error
    except (ValueError, RecursionError) as error:
        what_else = "For a file of data or code, name its environment with --env."
        raise ConfigError(
            f"the run file {path} is not TOML: {error}", remedy=None if path.suffix == ".toml" else what_else
        ) from error


PLACES = ("use", "loss", "score")  # keys whose value may be a reference to code


def anchored(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make references to code, `./file.py:Name`, and models, `./directory`, absolute, so that child processes and resumed runs
    find the same. Other strings remember their folder, for options that are paths."""
    return {key: _anchored(key, value, folder) for key, value in values.items()}


def _anchored(key: str, value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return anchored(value, folder)
    if key in PLACES and isinstance(value, list):
        return [_anchored(key, one, folder) for one in value]
    if not isinstance(value, str):
        return value
    if key in PLACES and (place := _PLACE.fullmatch(value)):
        return f"{place[1]}{(folder / Path(place[2]).expanduser()).resolve()}{place[3]}"
    if key == "model" and value.startswith(("./", "../")):
        return str((folder / value).resolve())
    return WrittenIn(value, folder)


_PLACE = re.compile(r"((?:\w+:)?)(.+\.py)((?::\w+)?)")  # also NAME:./file.py, for a component that takes a file


def parse_flag(text: str) -> tuple[str, Any]:
    """Split `trainer.learning_rate=1e-6` into path and value. The value is TOML, or plain text if it is not valid TOML."""
    path, equals, raw = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set wants PATH=VALUE, as in --set trainer.learning_rate=1e-6; it got {text!r}.")
    try:
        value = parse_toml(f"value = {raw}")["value"]
    except ValueError:
        value = raw
    return path.strip(), value


def nest(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Turn dotted paths into nested tables."""
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
    """Dump a model to values that TOML can hold (no None)."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(entry) for key, entry in value.items() if entry is not None}
        return [clean(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    cleaned: dict[str, Any] = clean(config.model_dump(mode="json"))
    return cleaned


def to_toml(values: Mapping[str, Any], prefix: str = "") -> str:
    """Format nested values as TOML tables."""
    lines = [f"{_key(key)} = {toml_value(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for key, table in values.items():
        if isinstance(table, Mapping):
            path = f"{prefix}{_key(key)}"
            body = to_toml(table, f"{path}.")
            lines.append(f"\n[{path}]\n{body}".rstrip())
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Format one value. Tables inside a list are inline. Strings are JSON strings, which are valid TOML basic strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, list):
        return f"[{', '.join(toml_value(entry) for entry in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {toml_value(entry)}' for key, entry in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def left_out(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the default components that a configuration leaves out, by section, in the form of a run file."""
    defaults = RunConfig()
    return {
        section: {
            name: {"use": LEFT_OUT} for name in getattr(defaults, section) if name not in getattr(config, section)
        }
        for section in NAMED
    }


def _in_order(section: str, there: Mapping[str, Any], named: Mapping[str, Any], layer: Layer) -> dict[str, Any]:
    """Return the components of a section plus those that a layer names, in order. New ones come first, so that a transform of
    rewards runs before the one that computes advantages. A file, unlike flags, also sets the order of those that it names.
    Raises ConfigError if a component to leave out does not exist."""
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
                into[key] = {}  # another component: drop the options of the former one
            _merge(into[key], value, origins, origin, f"{path}.")
        elif isinstance(value, Mapping):
            into[key] = {}
            _merge(into[key], value, origins, origin, f"{path}.")
        else:
            into[key] = value
            origins[path] = origin


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)
