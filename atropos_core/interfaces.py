"""What each kind of component must do.

An ABC where core gives a default or owns a lifetime, a Protocol where it is one call. Everything that can wait is a
coroutine, and whoever calls it sets the deadline.
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

from atropos_core.errors import AtroposError, PluginError
from atropos_core.launchers import Launcher as Launcher  # which is described there
from atropos_core.sandboxes import Sandbox as Sandbox  # and this one there
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
    ScoredGroup,
    Split,
    Task,
    Tokens,
    TopK,
)

Transport = Literal["in_process", "posix_shm", "cuda_ipc", "broadcast", "checkpoint", "adapter", "copy", "prompt"]
Outcome = Literal["trained", "flat", "stale", "failed", "dropped"]


class Policy(Protocol):
    """All that an environment sees of the model."""

    sampling: Sampling

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        after: Tokens | None = None,
    ) -> Tokens:
        """Prompt ids for a reply. With `after` (a history that ends in what was sampled), only the ids that extend
        it by `messages`: what was sampled is never encoded again. Raises DataError where the template rewrites
        history, so that there is nothing to extend."""

    async def sample(
        self,
        prompt: Tokens,
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        seed: int,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        """`n` continuations; with no `sampling`, the run's own."""

    async def parse(self, tokens: Tokens, *, prompt: Tokens | None = None) -> Message:
        """The assistant message that these sampled ids are: content, reasoning_content, tool_calls with arguments as dicts.
        Give the `prompt` that they continue: if it ends in an open `<think>`, the reply begins as reasoning."""


@dataclass(frozen=True)
class Score:
    """What an environment says of one reply."""

    value: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    abstains: bool = (
        False  # no score: `value` is 0, and the other rewards decide. Without any, the episode is not trained
    )


NO_COROUTINE = "begin it with `async def`, and return the score"


class Environment(ABC):
    """Poses tasks and runs them. It sees neither trainer nor engine.

    One turn is the default: give `tasks` and `score`, and `rollout` does the rest. For more turns override `rollout`
    (`atropos_core.Conversation` keeps the token history; docs/multi-turn.md builds one with tools).
    """

    at_once: int | None = None  # rollouts that may run at the same time: others wait, outside of their deadlines
    repeats: bool = (
        True  # a task is the same again. False: an endless stream, of which each rollout takes the next item
    )
    waits_for: str = ""  # whom a rollout needs that nobody here starts: `atropos check` runs none then

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Raises PluginError for a method under the name that it had before: nobody would call it."""
        super().__init_subclass__(**keywords)
        for before, name in (("play", "rollout"), ("play_group", "rollout_group")):
            if {"task", "policy"} <= set(getattr(getattr(vars(cls).get(before), "__code__", None), "co_varnames", ())):
                raise PluginError(
                    f"{cls.__qualname__} has {before}(task, policy, ...), which is called {name}() now.",
                    remedy=f"Rename it to {name}: what it is given and what it returns are the same.",
                )

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]:
        """The problems of a split, in a fixed order. May be lazy: only `len` and indexing are used."""

    def tools_of(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """JSON schemas in OpenAI's form that `rollout` shows the policy with this task."""
        return ()

    async def score(self, task: Task, reply: Message) -> float | Score:
        """How good the assistant's `reply` is. Any finite range will do."""
        raise NotImplementedError(f"{type(self).__name__} must override either score() or rollout()")

    def source(self) -> str:
        """Where the tasks come from, in a few words for the opening lines of a run."""
        return ""

    async def open(self) -> None:
        """Called once before the first rollout; load data and start helpers here."""

    async def close(self) -> None:
        """Called once at the end, also after a failure; may be called twice."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        """One rollout of `task`. Whatever is random in it derives from `seed`."""
        from atropos_core.conversation import Conversation

        talk = Conversation(policy, seed=seed, tools=self.tools_of(task) or None)
        reply = await talk.reply(*task.messages)
        scoring = self.score(task, reply)
        if not isawaitable(scoring):
            raise PluginError(f"{type(self).__name__}.score() gave {type(scoring).__name__}: {NO_COROUTINE}.")
        if (scored := await scoring) is None:
            raise PluginError(f"{type(self).__name__}.score() gave None: it returns a number, or a Score.")
        return talk.episode(scored if isinstance(scored, Score) else Score(scored))

    @cached_property
    def room(self) -> AbstractAsyncContextManager[object]:
        """What each rollout holds while it runs: there are `at_once` of it."""
        return nullcontext() if self.at_once is None else asyncio.Semaphore(self.at_once)

    async def rollout_group(
        self, task: Task, policy: Policy, n: int, *, seeds: Sequence[int]
    ) -> Sequence[Episode | Failed | BaseException]:
        """`n` rollouts, concurrently. An exception is that rollout's failure, not the group's."""
        return await asyncio.gather(
            *(self.rollout(task, policy, seed=seed) for seed in seeds[:n]), return_exceptions=True
        )


@dataclass(frozen=True)
class ModelInfo:
    """What an engine or trainer says of the model that it opened. The run compares these."""

    architecture: str
    parameters: int | None  # of the base model, ties counted once; None: not known
    vocabulary: int
    dtype: str
    device: str
    tokenizer: str  # fingerprint, see atropos_core.rollouts.tokenizer
    threads: int = 0
    instance: str = ""  # of an engine behind an address: another process there has another


class Endpoint(Protocol):
    """Where a bridge meets an engine or a trainer, in whatever process that one lives."""

    host: str = ""  # by which this process reaches the machine of that one; "" where it is this machine

    async def load_extension(self, reference: str) -> None:
        """Import `"pkg.mod:Class"` over there and keep `Class(component)`."""

    async def call(
        self, method: str, *arguments: Any, descriptors: Sequence[int] = (), deadline_s: float = 60.0
    ) -> tuple[Any, list[int]]:
        """Call the extension's coroutine `method(*arguments)`, with the keyword `descriptors=[...]` where there are any: they are
        the extension's from there on. What it returns comes as a pair: `value, _ = await endpoint.call("method")`. Descriptors
        come back, unpacked, where it returns `atropos_core.processes.rpc.Reply(value, descriptors)`, and the caller owns
        and closes them; else that list is empty, and a tuple is a value as any other."""


class WeightHolder(Protocol):
    """What an engine or a trainer shows, inside its own process, to a bridge's extension."""

    model: Any  # a torch.nn.Module with Hugging Face parameter names; on the meta device until weights are adopted

    def weights_moved(self) -> None:
        """The storage behind `model`'s parameters was replaced: rebuild whatever pointed at it."""


class WeightServer(Protocol):
    """What an engine whose weights live in a server of its own shows, inside the engine's process, to a bridge's extension."""

    worker_devices: Sequence[str]  # of each worker, which all have weights

    async def transfer_weights(
        self, stage: Literal["init", "start", "update", "finish"], info: Mapping[str, Any], deadline_s: float
    ) -> None:
        """Have every worker of the server run that stage of the weight transfer which the bridge requested by announcing
        `weight_transfer` (Provider.announces). `info` is JSON. Raises WeightsMismatch with the worker's message."""


class Engine(ABC):
    """Samples from the current policy: prompt ids in; sampled ids, their logprobs and each token's version out."""

    endpoint: Endpoint
    outlives_run: bool = False  # it was there before the run: it may hold another's weights, or be paused by it

    @abstractmethod
    async def open(self) -> ModelInfo:
        """Load the model. Called once, before anything else."""

    @abstractmethod
    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        """`n` continuations, the i-th drawn with `seeds[i]`; concurrent calls share batches. Each ends with its first token
        that ends a turn of the model, or that is one of `sampling.stop_ids`. Raises DeadlineExceeded."""

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        """Per sequence f32[T]: entry t is log p(token t | tokens before it), entry 0 is 0."""
        raise NotImplementedError(f"{type(self).__name__} cannot score given tokens")

    async def top_logprobs(self, sequences: Sequence[Tokens], k: int, temperature: float = 1.0) -> list[TopK]:
        """Per sequence of T tokens T entries: the k likeliest tokens of the distribution that predicts token t. Entry 0 has
        none."""
        raise NotImplementedError(f"{type(self).__name__} cannot tell the likeliest tokens of given sequences")

    @abstractmethod
    async def pause(self) -> None:
        """Return once no token is being computed. What is in flight is kept; what was computed under the old
        weights (KV) is dropped and computed again after `resume`."""

    @abstractmethod
    async def resume(self, version: int) -> None:
        """Go on, and mark every token sampled from here on with `version`."""

    async def load_weights(self, directory: Path) -> None:
        """Take the weights of a model directory in place of the present ones. Called while paused."""
        raise NotImplementedError(f"{type(self).__name__} cannot load weights while it runs")

    async def load_adapter(self, directory: Path, version: int) -> None:
        """Sample what begins from here on with this peft adapter, marked with `version`. What is in flight may finish
        with what it began with, under that one's version. Returns once `directory` is no longer read; adapters that
        nothing uses any more are let go. Not called while paused."""
        raise NotImplementedError(f"{type(self).__name__} cannot load adapters while it runs")

    async def release_cache(self) -> None:
        """An update comes before anything is sampled: memory that only sampling needs may be given back until then. What is in flight
        loses nothing. An engine without this keeps its memory."""

    @asynccontextmanager
    async def paused(self, version: int) -> AsyncIterator[None]:
        """Paused inside, at `version` afterwards. An exception inside leaves the engine paused."""
        await self.pause()
        yield
        await self.resume(version)

    async def close(self) -> None:
        """Release everything; may be called twice."""


class EngineServer(Protocol):
    """Lets others sample from an engine over a network, until `close`."""

    url: str  # where workers reach it

    async def close(self) -> None:
        """Stop serving; the engine goes on. May be called twice."""


class ServeEngine(Protocol):
    """Starts an EngineServer for an engine that is open (`info`), at HOST:PORT. Raises ConfigError where that cannot be, or
    must not be: others may reach it only with the token of `token_file`."""

    async def __call__(
        self, engine: Engine, where: str, token_file: Path | None, info: ModelInfo | None = None
    ) -> EngineServer: ...


class OpenSource(Protocol):
    """Opens the groups of a run with an [api]: a `rollouts.source.Source` for this RunConfig and Profile. `context_tokens` is the
    model's context length, or 0 if it is unknown."""

    def __call__(
        self,
        config: Any,
        curriculum: Curriculum,
        model: ModelInfo,
        directory: Path,
        profile: Any,
        *,
        context_tokens: int,
    ) -> Any: ...  # the types of config, profile and source are above this module


class PolicySession(Protocol):
    """The calls of one episode, or of one of its agents, to a policy that is served over HTTP."""

    url: str  # speaks the APIs of OpenAI and Anthropic to a client that has `key`; ends in /v1
    key: str

    @property
    def failure(self) -> AtroposError | None:
        """The first error that the policy raised."""

    def end(self) -> Episode | None:
        """Refuse later calls and return what was sampled, with its ids and logprobs and a score of 0, or None if nothing was
        sampled. May be called once."""


class PolicyServer(Protocol):
    """Lets programs on this machine sample from policies, until `close`. For environments that bring a client of their own."""

    async def session(self, policy: Policy, *, seed: int, name: str) -> PolicySession:
        """`name` is for people: the task's."""

    async def close(self) -> None:
        """End the calls that wait. May be called twice."""


class ServePolicies(Protocol):
    """Starts a PolicyServer that only this machine can reach, for policies of the model in this directory. `today` is the date
    that its chat template is given (RunContext.today)."""

    async def __call__(self, model: Path, today: str = "") -> PolicyServer: ...


Writing = Callable[[], AbstractAsyncContextManager[None]]


class Trainer(ABC):
    """Turns batches into updates. However many ranks there are, they are behind this."""

    endpoint: Endpoint

    @abstractmethod
    async def open(self) -> ModelInfo:
        """Build the model. With a transport that shares memory, its parameters come from the bridge afterwards."""

    @abstractmethod
    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        """Epochs and minibatches over one batch. Parameters change only inside `async with writing()`, which is
        entered once. Raises TrainingDiverged: before `writing` is entered, and then nothing has changed, or inside it,
        and then the run must stop."""

    @abstractmethod
    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        """As Engine.logprobs, by the trainer's own forward pass."""

    async def rounding(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> float | None:
        """The measured number of nats by which rounding can move a logprob of these sequences. Engine and trainer may differ by so
        much. None if this trainer cannot measure it."""
        return None

    async def token_values(self) -> Mapping[str, Floats]:
        """What the last `step` knows of each token of its batch, for whoever records it: by name [N], NaN where it has
        none. `advantages` as the loss took them; `trainer_logprobs` and `entropy` of the policy before the update. Empty
        where this trainer keeps none."""
        return {}

    @abstractmethod
    async def save(self, directory: Path) -> None:
        """Write everything that the next step depends on into this existing, empty directory."""

    @abstractmethod
    async def restore(self, directory: Path) -> None:
        """Take up exactly where `save` left off. Called inside a bridge's `writing`."""

    async def close(self) -> None:
        """Release everything; may be called twice."""


@dataclass(frozen=True)
class Publication:
    """One publishing of weights. `seconds` is what the bridge itself took: pause, version, resume, and whatever it
    copied, saved or loaded; the optimiser's work inside is not in it."""

    version: int  # that the engines sample from now
    seconds: float
    bytes_copied: int
    bytes_on_disk: int = 0  # of what was written to disk for it, while it exists


class Bridge(ABC):
    """Makes the engines sample from the weights that the trainer writes."""

    published: Publication | None = None  # the last one: after a `writing`, None where the engines stayed as they were

    def extensions(self) -> Mapping[Literal["engine", "trainer"], str]:
        """The bridge's code that runs inside the engine's and the trainer's process, as "pkg.mod:Class"."""
        return {}

    @abstractmethod
    async def connect(self, trainer: Endpoint, engines: Sequence[Engine]) -> None:
        """Lay the way. Called once, after both ends are open and their extensions loaded. Raises WeightsMismatch."""

    @abstractmethod
    def writing(self, version: int) -> AbstractAsyncContextManager[None]:
        """Parameters may change inside; afterwards the engines are at `version`, unless this bridge publishes only
        every so many versions. An exception inside leaves the engines paused, and the run must stop."""

    async def publish(self, version: int) -> None:
        """Bring the engines to `version`, which has been written: called before a run's last evaluation, where `writing`
        left them behind. Raises as `writing`."""
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
        """Called before the first draw, and again where environments come and go."""

    def draw(self, n: int) -> list[Draw]: ...
    def settle(self, draw: Draw, outcome: Outcome, group: ScoredGroup | None) -> None: ...
    def state(self) -> Mapping[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


class Reward(Protocol):
    """Scores the G episodes of one task, beside the scores that the environment gave itself. One that holds connections
    or processes may have a coroutine `open()`, awaited before the first call, and has `close()`, awaited at the end. One
    whose calls wait for each other's end has `queues = True`: its `deadline_s` is then for each call of the queue."""

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats: ...  # [G]


class Transform(Protocol):
    """Turns the leased groups of a step into groups with advantages: normalise, filter, shape."""

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]: ...


class Teacher(ABC):
    """Annotates groups before any filter sees them."""

    async def open(self) -> None:
        """Called once, before the first step; load the teacher's model here."""

    @abstractmethod
    async def annotate(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """The same groups, in the same order, with `Rollout.teacher` where there is something to say."""

    async def close(self) -> None:
        """Release everything; may be called twice."""


@dataclass(frozen=True)
class SettledGroup:
    """A group, and what came of it."""

    group: ScoredGroup  # as it was trained, or as it was before it was dropped
    outcome: Outcome | None  # None: not known
    dropped_by: str = ""  # "transform.NAME", "training.max_staleness", "training.min_group", or the hub's cause
    batch_start: int | None = None  # of its first token in the batch that was trained
    scored: Floats | None = None  # [G] the rewards as they were before a transform changed them
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas that the policy was shown, where they are known


@dataclass(frozen=True)
class StepRecord:
    """A finished step, with all that is known of it."""

    step: int
    metrics: Metrics
    groups: Sequence[ScoredGroup]  # those that the trainer leased, and those that failed
    settled: Sequence[SettledGroup] = ()  # the same, then some of those that were dropped before anybody leased them
    token_values: Mapping[str, Floats] = field(default_factory=dict)  # of the batch, as Trainer.token_values


class Sink(ABC):
    """Records a run. Called in step order."""

    async def open(self) -> None:
        """Called once, after `load` where a run is resumed."""

    @abstractmethod
    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        """One finished step. Step 0 carries the evaluation before training."""

    def wants_token_values(self, step: int) -> bool:
        """Whether `record` of this step needs what the trainer knows of each token."""
        return False

    async def record(self, record: StepRecord) -> None:
        """One finished step, for a sink that records more than `step` takes; this is what a run calls."""
        await self.step(record.step, record.metrics, record.groups)

    async def close(self) -> None:
        """Flush and release; may be called twice."""


class Adapter(Protocol):
    """Shows our environments to another framework, in that framework's own types."""

    def export(self, run: Any, out: Path) -> list[Path]: ...  # run: atropos_core.config.run_file.RunConfig
    def versions(self) -> Mapping[str, str]: ...
    def doctor(self) -> Sequence[Finding]: ...


class Loss(Protocol):
    """What a trainer minimises. How it is called is between it and the trainers that take it; it knows what must hold."""

    def findings(self, *, skip: Sequence[str] = ()) -> list[Finding]: ...  # `atropos check NAME`


@dataclass(frozen=True)
class Finding:
    """One line of a doctor's report."""

    subject: str
    ok: bool | None  # None: worth knowing, neither good nor bad
    detail: str
    remedy: str = ""


class CheckComponent(Protocol):
    """Checks a component against the contract of its kind, and returns that kind and what was found. Without `kind`, the kind
    follows from the component. Raises ConfigError or UnknownComponent for something that is not a component."""

    def __call__(
        self, component: Any, kind: str | None, options: Mapping[str, Any], skip: Sequence[str]
    ) -> tuple[str, list[Finding]]: ...


@runtime_checkable
class Stateful(Protocol):
    """What a resumed run must restore: curricula, transforms, hub, sinks. State is JSON-able."""

    def state(self) -> Mapping[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Marked(Stateful, Protocol):
    """Stateful, with too much state to write down after every step: it remembers the end of a step by itself."""

    def mark(self) -> None:
        """A step has ended, or none has begun. Called after every step: quick, whatever the size of the state."""

    def marked(self) -> Mapping[str, Any]:
        """What `state()` gave, or would have given, at the last `mark`, whatever has happened since. Called when a
        checkpoint is saved, and not changed afterwards."""


@runtime_checkable
class SelfChecked(Protocol):
    """An environment that promises more than every environment does: `atropos check` reports on that as well."""

    async def own_findings(self, task: Task, policy: Policy) -> Sequence[Finding]:
        """While it is open, after the usual checks. `policy` answers the same to everything."""


@runtime_checkable
class OverMachines(Protocol):
    """A trainer that may span machines, with a process on each: `RunContext.machine` is its number. The first leads: calls of Trainer come
    to it alone, and it makes its own to the others."""

    async def lead(self, host: str) -> Sequence[str]:
        """Of the first, before `open`: for each of the others where it connects to, with a secret. `host`: by which they reach this one."""

    async def follow(self, leader: str) -> None:
        """Of another one: connect, and answer the first's calls from here on. When that is gone, this process ends."""


@runtime_checkable
class Measured(Protocol):
    """What has numbers of its own for the metrics of a run: rewards, teachers, transforms, curricula."""

    def metrics(self) -> Metrics:
        """Of the step that has ended, by short names; they appear under the component's path in the run file, as in
        `transform/NAME/mean`. Called once after each step."""
