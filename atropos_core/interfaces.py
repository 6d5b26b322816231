"""The interface of each kind of component.

A kind is an ABC if core provides defaults or manages its lifetime, and a Protocol if it is a single call. Everything that
can wait is a coroutine; the caller sets the deadline.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from inspect import isawaitable
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from atropos_core.conversation import Conversation, Policy
from atropos_core.errors import PluginError
from atropos_core.launchers import Launcher as Launcher  # documented there
from atropos_core.sandboxes import Sandbox as Sandbox  # documented there
from atropos_core.types import (
    Batch,
    Completion,
    Draw,
    Episode,
    Failed,
    Floats,
    Message,
    Metrics,
    Sampling,
    Score,
    ScoredGroup,
    Split,
    Task,
    Tokens,
    TopK,
)

Transport = Literal[
    "in_process", "posix_shm", "cuda_ipc", "broadcast", "checkpoint", "adapter", "copy", "prompt", "remote"
]
Outcome = Literal["trained", "flat", "stale", "failed", "dropped"]


NO_COROUTINE = "begin it with `async def`, and return the score"


class Environment(ABC):
    """Provides tasks and runs rollouts of them. It does not see the trainer or the engine.

    For one turn, define `tasks` and `score`; the default `rollout` does the rest. For more turns, override `rollout`
    (`atropos_core.Conversation` keeps the token history; docs/multi-turn.md builds one with tools).
    """

    at_once: int | None = None  # most rollouts at the same time; waiting for a turn does not count against deadlines
    repeats: bool = True  # a task can be run again. False: an endless stream; each rollout takes the next item
    waits_for: str = ""  # an external service that rollouts depend on; if set, `atropos check` skips rollouts
    # How a reply must give its answer, and which option changes that; {name} is the environment's. Said if replies never do: if the
    # metric `answered` of scores, 0 or 1, is 0.
    answer_format: str = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Raises PluginError for a method with an old name, which would never be called."""
        super().__init_subclass__(**keywords)
        for before, name in (("play", "rollout"), ("play_group", "rollout_group")):
            if {"task", "policy"} <= set(getattr(getattr(vars(cls).get(before), "__code__", None), "co_varnames", ())):
                raise PluginError(
                    f"{cls.__qualname__} has {before}(task, policy, ...), which is called {name}() now.",
                    remedy=f"Rename it to {name}: what it is given and what it returns are the same.",
                )

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of a split, in a fixed order. May be lazy: only `len` and indexing are used."""

    def tools_of(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """Return the tools that `rollout` offers the policy for this task, as JSON schemas in OpenAI's form."""
        return ()

    async def score(self, task: Task, reply: Message) -> float | Score:
        """Return how good the assistant's `reply` is. Any finite range will do."""
        raise PluginError(
            f"{type(self).__name__} must override either score() or rollout().",
            remedy="Write `async def score(self, task, reply)`, which returns a number.",
        )

    def source(self) -> str:
        """Return where the tasks come from, in a few words, for the first lines of a run."""
        return ""

    async def open(self) -> None:
        """Called once before the first rollout; load data and start helpers here."""

    async def close(self) -> None:
        """Called once at the end, also after a failure; may be called twice."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        """Run one rollout of `task`. Derive all randomness from `seed`."""
        talk = Conversation(policy, seed=seed, tools=self.tools_of(task) or None)
        reply = await talk.reply(*task.messages)
        scoring = self.score(task, reply)
        if not isawaitable(scoring):
            raise PluginError(f"{type(self).__name__}.score() gave {type(scoring).__name__}: {NO_COROUTINE}.")
        if (scored := await scoring) is None:
            raise PluginError(f"{type(self).__name__}.score() gave None: it returns a number, or a Score.")
        return talk.episode(scored if isinstance(scored, Score) else Score(scored))

    @cached_property
    def slot(self) -> AbstractAsyncContextManager[object]:
        """A semaphore that each rollout holds while it runs, with `at_once` slots."""
        return nullcontext() if self.at_once is None else asyncio.Semaphore(self.at_once)

    async def rollout_group(
        self, task: Task, policy: Policy, n: int, *, seeds: Sequence[int]
    ) -> Sequence[Episode | Failed | BaseException]:
        """Run `n` rollouts concurrently. An exception in the result means that this rollout failed, not the group."""
        return await asyncio.gather(
            *(self.rollout(task, policy, seed=seed) for seed in seeds[:n]), return_exceptions=True
        )


@dataclass(frozen=True)
class ModelInfo:
    """An engine's or trainer's description of its model. The run compares these."""

    architecture: str
    parameters: int | None  # of the base model, tied ones counted once; None: unknown
    vocabulary: int
    dtype: str
    device: str
    tokenizer: str  # fingerprint, see atropos_core.rollouts.tokenizer
    threads: int = 0
    instance: str = ""  # identifies the process behind an engine's address


class Endpoint(Protocol):
    """A bridge's connection to the process of an engine or a trainer, which may be this process."""

    host: str = ""  # address by which this process reaches that machine; "" for this machine

    async def load_extension(self, reference: str) -> None:
        """Import `"pkg.mod:Class"` in that process and keep `Class(component)`."""

    async def call(
        self, method: str, *arguments: Any, descriptors: Sequence[int] = (), deadline_s: float = 60.0
    ) -> tuple[Any, list[int]]:
        """Call the extension's coroutine `method(*arguments)`. If there are descriptors, it gets them as the keyword
        `descriptors=[...]` and owns them from then on.

        Returns a pair: `value, _ = await endpoint.call("method")`. An extension sends descriptors back by returning
        `atropos_core.processes.rpc.Reply(value, descriptors)`; the caller owns and closes them. Otherwise the list is
        empty. A tuple is an ordinary value."""


class WeightHolder(Protocol):
    """What a bridge extension can access inside the process of an engine or a trainer."""

    model: Any  # a torch.nn.Module with Hugging Face parameter names; on the meta device until weights are adopted

    def weights_moved(self) -> None:
        """Called after the storage of `model`'s parameters was replaced: rebuild everything that pointed to it."""


class WeightServer(Protocol):
    """What a bridge extension can access when the engine's weights live in a separate server."""

    worker_devices: Sequence[str]  # one per worker; every worker has weights

    async def transfer_weights(
        self, stage: Literal["init", "start", "update", "finish"], info: Mapping[str, Any], deadline_s: float
    ) -> None:
        """Run this stage of the weight transfer on every worker of the server. The bridge requests a transfer by announcing
        `weight_transfer` (Provider.announces). `info` is JSON. Raises WeightsMismatch with the worker's message."""


class Engine(ABC):
    """Samples from the current policy: prompt ids in; sampled ids, their logprobs and each token's version out."""

    endpoint: Endpoint
    outlives_run: bool = False  # it ran before this run: it may hold other weights, or be paused

    @abstractmethod
    async def open(self) -> ModelInfo:
        """Load the model. Called once, before anything else."""

    @abstractmethod
    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        """Return `n` continuations, the i-th sampled with `seeds[i]`. Concurrent calls share batches. A continuation ends
        after its first token that ends a turn of the model or is in `sampling.stop_ids`. Raises DeadlineExceeded."""

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        """Return f32[T] per sequence: entry t is log p(token t | tokens before it), entry 0 is 0."""
        raise NotImplementedError(f"{type(self).__name__} cannot score given tokens")

    async def top_logprobs(self, sequences: Sequence[Tokens], k: int, temperature: float = 1.0) -> list[TopK]:
        """Return a TopK of T positions per sequence of T tokens: at t, the k likeliest tokens of the distribution that
        predicts token t. Position 0 has none."""
        raise NotImplementedError(f"{type(self).__name__} cannot tell the likeliest tokens of given sequences")

    @abstractmethod
    async def pause(self) -> None:
        """Return once no token is being computed. Keep requests in flight, but drop what was computed with the old
        weights (the KV cache) and compute it again after `resume`."""

    @abstractmethod
    async def resume(self, version: int) -> None:
        """Continue, and mark every token sampled from now on with `version`."""

    async def load_weights(self, directory: Path) -> None:
        """Replace the present weights by those of a model directory. Called while paused."""
        raise NotImplementedError(f"{type(self).__name__} cannot load weights while it runs")

    async def load_adapter(self, directory: Path, version: int) -> None:
        """Sample new requests with this peft adapter and mark their tokens with `version`. Requests in flight may finish
        with the adapter and version that they started with. Return once `directory` is no longer read. Free adapters
        that no request uses any more. Not called while paused."""
        raise NotImplementedError(f"{type(self).__name__} cannot load adapters while it runs")

    async def release_cache(self) -> None:
        """Called when the next thing to happen is an update. The engine may free memory that only sampling needs; requests
        in flight must not be lost. The default keeps the memory."""

    async def step_metrics(self) -> Metrics:
        """Return numbers of what was sampled since the last call, by short names. They appear under the engine's path in the run
        file, as in `engine/NAME`. Called once after each step, if the provider's `measures` is true for the engine's options."""
        return {}

    @asynccontextmanager
    async def paused(self, version: int) -> AsyncIterator[None]:
        """Pause the engine inside the block and resume it at `version`. After an exception it stays paused."""
        await self.pause()
        yield
        await self.resume(version)

    async def close(self) -> None:
        """Release everything; may be called twice."""


Writing = Callable[[], AbstractAsyncContextManager[None]]


class Trainer(ABC):
    """Turns batches into updates. If there are several ranks, the trainer hides them."""

    endpoint: Endpoint

    @abstractmethod
    async def open(self) -> ModelInfo:
        """Build the model. With a transport that shares memory, its parameters come from the bridge afterwards."""

    @abstractmethod
    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        """Train one batch, over all epochs and minibatches. Parameters change only inside `async with writing()`, which is
        entered once. Raises TrainingDiverged. If raised before `writing` is entered, nothing has changed; if raised
        inside it, the run must stop."""

    async def supervised_step(self, batch: Batch, learning_rate: float) -> Metrics:
        """Train one batch of supervised rows (a warm start): one update that minimises the mean negative log-likelihood of its trained
        tokens. All calls come before the first `step`. Nothing samples meanwhile, and the bridge publishes afterwards. Raises
        TrainingDiverged."""
        raise NotImplementedError(f"{type(self).__name__} takes no supervised steps")

    @abstractmethod
    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        """Return the same as Engine.logprobs, from the trainer's own forward pass."""

    async def rounding(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> float | None:
        """Measure by how many nats rounding can move a logprob of these sequences. Engine and trainer may differ by this
        much. Return None if this trainer cannot measure it."""
        return None

    async def token_values(self) -> Mapping[str, Floats]:
        """Return per-token values of the last `step`'s batch for the records: name -> [N], NaN where there is no value.
        `advantages` are those that the loss used; `trainer_logprobs` and `entropy` are of the policy before the update.
        Empty if this trainer keeps none."""
        return {}

    @abstractmethod
    async def save(self, directory: Path) -> None:
        """Write everything that the next step depends on into this existing, empty directory."""

    @abstractmethod
    async def restore(self, directory: Path) -> None:
        """Restore the exact state that `save` wrote. Called inside a bridge's `writing`."""

    async def close(self) -> None:
        """Release everything; may be called twice."""


@dataclass(frozen=True)
class Publication:
    """One publishing of weights. `seconds` is the bridge's own time: pause, version, resume, and anything it copied, saved
    or loaded. It excludes the optimizer's work."""

    version: int  # that the engines now sample from
    seconds: float
    bytes_copied: int
    bytes_on_disk: int = 0  # temporary files written for it


class Bridge(ABC):
    """Makes the engines sample from the weights that the trainer writes."""

    published: Publication | None = None  # the last one; None after a `writing` that left the engines as they were

    def extensions(self) -> Mapping[Literal["engine", "trainer"], str]:
        """Return the bridge's code that runs in the engine's and the trainer's process, as "pkg.mod:Class"."""
        return {}

    @abstractmethod
    async def connect(self, trainer: Endpoint, engines: Sequence[Engine]) -> None:
        """Connect trainer and engines. Called once, after both are open and have loaded their extensions. Raises
        WeightsMismatch."""

    @abstractmethod
    def writing(self, version: int) -> AbstractAsyncContextManager[None]:
        """Allow parameters to change inside the block. Afterwards the engines are at `version`, unless this bridge publishes
        less often than every version. After an exception the engines stay paused, and the run must stop."""

    async def publish(self, version: int) -> None:
        """Bring the engines to `version`, which has already been written. Called before a run's last evaluation if `writing`
        left them behind. Raises the same errors as `writing`."""
        async with self.writing(version):
            pass

    async def close(self) -> None:
        """Release every handle that this bridge opened; may be called twice."""


@dataclass(frozen=True)
class TaskSource:
    """One environment as a curriculum sees it."""

    size: int
    weight: float
    tasks: Sequence[Task] | None = field(
        default=None, repr=False, compare=False
    )  # may be lazy; None: not in this process


class Curriculum(Protocol):
    """Decides which task comes next, and learns how each draw was settled."""

    def open(self, sources: Mapping[str, TaskSource]) -> None:
        """Called before the first draw, and again when environments are added or removed."""

    def draw(self, n: int) -> list[Draw]: ...
    def settle(self, draw: Draw, outcome: Outcome, group: ScoredGroup | None) -> None: ...
    def state(self) -> Mapping[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


class Reward(Protocol):
    """Scores the G episodes of one task, in addition to the environment's own scores. A reward that holds connections or
    processes may define `open()`, awaited before the first call, and `close()`, awaited at the end. Set `queues = True` if
    its calls wait for each other: its `deadline_s` then applies to each call in the queue separately.

    In place of a number, it may return `Score(value, turns=[...])` for an episode, which places parts of `value` inside the
    rollout: a number for each turn of the policy, or TurnRewards for each rollout. `Score(value, metrics={"canary/leak": 1.0})`
    reports numbers of an episode; their names have a slash."""

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats | Sequence[float | Score]: ...  # [G]


class Transform(Protocol):
    """Turns the leased groups of a step into groups with advantages: normalise, filter, shape."""

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]: ...


class Teacher(ABC):
    """Annotates groups before any filter runs."""

    async def open(self) -> None:
        """Called once, before the first step; load the teacher's model here."""

    @abstractmethod
    async def annotate(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """Return the same groups in the same order, with `Rollout.teacher` set where the teacher has something to say."""

    async def close(self) -> None:
        """Release everything; may be called twice."""


@dataclass(frozen=True)
class SettledGroup:
    """A group and its outcome."""

    group: ScoredGroup  # as it was trained, or as it was before it was dropped
    outcome: Outcome | None  # None: unknown
    dropped_by: str = ""  # "transform.NAME", "training.max_staleness", "training.min_group", or the hub's cause
    batch_start: int | None = None  # of its first token in the batch that was trained
    scored: Floats | None = None  # [G] the rewards before any transform changed them
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas that the policy was shown, if known


@dataclass(frozen=True)
class StepRecord:
    """Everything known about a finished step."""

    step: int
    metrics: Metrics
    groups: Sequence[ScoredGroup]  # those that the trainer leased, and those that failed
    settled: Sequence[SettledGroup] = ()  # the same, then some of those that were dropped before they were leased
    token_values: Mapping[str, Floats] = field(default_factory=dict)  # of the batch, see Trainer.token_values


class Sink(ABC):
    """Records a run. Called in step order."""

    async def open(self) -> None:
        """Called once; in a resumed run, after `load`."""

    @abstractmethod
    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        """Record one finished step. Step 0 carries the evaluation before training."""

    def wants_token_values(self, step: int) -> bool:
        """Return True if `record` needs this step's per-token values from the trainer."""
        return False

    async def record(self, record: StepRecord) -> None:
        """Record one finished step. A run calls this; override it to record more than `step` gets."""
        await self.step(record.step, record.metrics, record.groups)

    async def close(self) -> None:
        """Flush and release; may be called twice."""


class Adapter(Protocol):
    """Makes our environments available in another framework, in that framework's own types."""

    def export(self, run: Any, out: Path) -> list[Path]: ...  # run: atropos_core.config.run_file.RunConfig
    def versions(self) -> Mapping[str, str]: ...
    def doctor(self) -> Sequence[Finding]: ...


class Loss(Protocol):
    """The objective that a trainer minimises. Its call signature is between it and the trainers that support it."""

    contract: str  # its contract tests, "pkg.mod:function": function(loss, skip=names) returns a list of Finding


@dataclass(frozen=True)
class Finding:
    """One line of a doctor's report."""

    subject: str
    ok: bool | None  # None: information, neither good nor bad
    detail: str
    remedy: str = ""


@runtime_checkable
class Stateful(Protocol):
    """A component whose state a resumed run must restore: curricula, transforms, hub, sinks. State must be JSON-able."""

    def state(self) -> Mapping[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Snapshotted(Stateful, Protocol):
    """A Stateful component whose state is too large to write after every step, so it remembers the end of a step."""

    def take_snapshot(self) -> None:
        """Remember the present state: a step has ended, or none has begun. Called after every step; must be quick."""

    def snapshot(self) -> Mapping[str, Any]:
        """Return what `state()` returned, or would have returned, at the last `take_snapshot`, regardless of later changes. Called
        when a checkpoint is saved. The result must not change afterwards."""


@runtime_checkable
class SelfChecked(Protocol):
    """An environment with extra guarantees, which `atropos check` also tests."""

    async def own_findings(self, task: Task, policy: Policy) -> Sequence[Finding]:
        """Called while it is open, after the usual checks. `policy` gives the same answer to everything."""


@runtime_checkable
class OverMachines(Protocol):
    """A trainer that may span machines, with one process on each: `RunContext.machine` is its number. The first one leads: it
    receives all calls of Trainer and passes them on to the others."""

    async def lead(self, host: str) -> Sequence[str]:
        """Called on the first process before `open`. Return, for each other process, the address to connect to, with a secret.
        `host` is the address by which the others reach this machine."""

    async def follow(self, leader: str) -> None:
        """Called on every other process: connect and answer the leader's calls. When the leader is gone, this process ends."""


@runtime_checkable
class Measured(Protocol):
    """A component that adds numbers to a run's metrics: rewards, teachers, transforms, curricula."""

    def metrics(self) -> Metrics:
        """Return the numbers of the step that has ended, by short names. They appear under the component's path in the run
        file, as in `transform/NAME/mean`. Called once after each step."""
