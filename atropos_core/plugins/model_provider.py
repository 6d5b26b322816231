"""The descriptions of components that have a model, or move one: engines, trainers, bridges and teachers; and of the memory that
they take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from atropos_core.plugins.provider import Provider, RunContext, T_co

if TYPE_CHECKING:
    from atropos_core.interfaces import Bridge, Engine, Teacher, Trainer, Transport  # noqa: F401 - bases name them in strings

PROMPT_TOKENS = 512  # assumed length of the longest prompt: environments are not called before they are built


# Phases of engines and of the trainer. In an on-policy run they alternate.
SAMPLING = ("sampling", "rescoring")
UPDATE = "update"
CONTEXT = "CUDA context"
CONTEXT_BYTES = 750_000_000  # includes cuBLAS kernels and workspaces; two processes took at most 1.39 GiB of an H100: results/gpu.json


@dataclass(frozen=True)
class MemoryUse:
    """Something that takes memory on a device."""

    what: str
    size_bytes: int
    device: str = "cpu"
    phase: str = ""  # held only in this phase; of a component's phases the largest counts
    shared: str = ""  # uses with the same name on one device are one copy
    # Values of the run file that make it smaller: path -> values to try, the mildest first.
    settings: Mapping[str, Sequence[Any]] = field(default_factory=dict)


Number = TypeVar("Number", int, float)


def halves(value: Number, least: Number) -> list[Number]:
    """Return a half of `value`, a quarter and so on, down to `least`. Integers stay integers; others have two decimals."""
    half: Any = value // 2 if isinstance(value, int) else round(value / 2, 2)
    return [half, *halves(half, least)] if half >= least else []


@dataclass(frozen=True)
class Workload:
    """The facts about a run from which a component estimates its memory."""

    context: RunContext  # that it will be built with
    groups: int  # of a step
    group_size: int
    max_tokens: int
    concurrent_rollouts: int  # rollouts that may be sampled at once
    prompt_tokens: int = PROMPT_TOKENS
    device_bytes: Mapping[str, int] = field(default_factory=dict)  # total memory of each device, if known
    temperature: float = 1.0  # the highest of the run's sampling and evaluations
    truncated: bool = False  # the run's sampling uses top_p, top_k or min_p
    takes_turns: bool = False  # nothing is sampled during an update
    shares_devices: bool = True  # another component of the run uses one of its GPUs
    min_p: float = 0.0  # the highest of the run's sampling and evaluations


class SizeChoice(NamedTuple):
    """Values of options that change only time and memory. `slower`: roughly, the share of a step's time that they cost."""

    slower: float
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelProvider(Provider[T_co]):
    """The base for components that have a model, or move one. Its functions use only files and options."""

    holds: Callable[[Any, Workload], Iterable[MemoryUse]] = lambda options, workload: ()  # memory that it will take
    check: Callable[[Any, Workload], None] = lambda options, workload: None  # raises for a model that it cannot run
    # values for the options named in the third argument, which change only time and memory; the last ones take the least memory
    sizes: Callable[[Any, Workload, Collection[str]], Sequence[SizeChoice]] = lambda options, workload, free: ()


@dataclass(frozen=True, kw_only=True)
class TeacherProvider(ModelProvider["Teacher"]):
    """A teacher, which annotates groups."""

    # its path in the run file -> role -> devices, for each process that it starts with the run's launcher
    roles: Callable[[Any, str], Mapping[str, tuple[str, ...]]] = lambda options, label: {}


@dataclass(frozen=True, kw_only=True)
class WeightsProvider(ModelProvider[T_co]):
    """The base for engines, trainers and bridges: they have to share a transport."""

    transports: Callable[[Any], frozenset[Transport]] = lambda options: frozenset()  # how its weights may travel


class BridgeProvider(WeightsProvider["Bridge"]):
    """A bridge, which moves weights from the trainer to the engines."""


@dataclass(frozen=True, kw_only=True)
class DeviceProvider(WeightsProvider[T_co]):
    """The base for engines and trainers, which run on the devices that a run file names."""

    dtype: Callable[[Any, Workload], str] = lambda options, workload: ""  # of its weights, as "float32"; "" if unknown
    # which of its ways to compute it takes for this model, and why: "rows: its layers keep a state"; "" if it has only one
    path: Callable[[Any, Workload], str] = lambda options, workload: ""
    # options (and "devices", "threads") that have no effect on these devices, with the reason
    idle: Callable[[Any, Sequence[str]], Mapping[str, str]] = lambda options, devices: {}
    several_devices: bool = False  # one instance may span several


@dataclass(frozen=True, kw_only=True)
class EngineProvider(DeviceProvider["Engine"]):
    """An engine, which samples from the policy."""

    # what it keeps in memory in addition to the model's own weights, for the start of a run; "" if nothing of size
    keeps: Callable[[Any, Workload], str] = lambda options, workload: ""
    measures: Callable[[Any], bool] = lambda options: False  # its `step_metrics` has numbers for a run's metrics


@dataclass(frozen=True, kw_only=True)
class TrainerProvider(DeviceProvider["Trainer"]):
    """A trainer, which turns batches into updates."""

    saves: Callable[[Any, Workload], int] = lambda options, workload: 0  # bytes of a checkpoint; 0 if unknown or small
    # values for options that neither the user nor a preset sets, for a model with this hidden size and a run of so many steps
    suits: Callable[[Any, int, int], Mapping[str, Any]] = lambda options, width, steps: {}
    # values that its options do not show, given how weights travel: name -> text, for the start of a run
    notes: Callable[[Any, Sequence[Transport]], Mapping[str, str]] = lambda options, transports: {}
    # the learning rate of supervised steps (a warm start) if none is set, given how weights travel. Raises ConfigError for options
    # that do not go with such steps. None: this trainer takes none
    supervised_rate: Callable[[Any, Sequence[Transport]], float] | None = None
    # merges the adapter saved in one directory into a whole model in another, empty directory
    merge: Callable[[Path, Path], None] | None = None
    fixed: tuple[str, ...] = ()  # options that its checkpoints are saved for: a resumed run keeps their values
    several_machines: bool = False  # it may be `OverMachines`
    # the engine and the bridge that it works with, for a run that names none: kind -> name
    goes_with: Mapping[str, str] = field(default_factory=dict)
