"""Options of the environment `agent`: which program, on which tasks, within which limits, and who scores it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from atropos_agent_api.environment.templates import GRADER_NAMES, check
from atropos_core.config.component import Component
from atropos_core.plugins.option_paths import AbsolutePath
from atropos_core.plugins.provider import Options


def _named(value: Any) -> Any:
    """`"gsm8k"` for `{use = "gsm8k"}`."""
    return {"use": value} if isinstance(value, str) else value


def _below(target: str) -> str:
    """Where a file of the program lies."""
    path = PurePosixPath(target.removeprefix("{home}/"))
    if path.is_absolute() or ".." in path.parts or not path.parts or "{" in str(path):
        raise ValueError(
            f'a file lies in the work directory, as "notes/a.txt", or in HOME, as "{{home}}/.agent.json", not at {target!r}'
        )
    return target


NamedComponent = Annotated[Component, BeforeValidator(_named)]


class FileOptions(Options):
    """One file that the program finds: one of the three."""

    text: str | None = Field(None, description="its text, with placeholders")
    template: AbsolutePath | None = Field(None, description="a text file, with placeholders")
    copy_of: AbsolutePath | None = Field(None, description="a file or folder, as it is")

    @model_validator(mode="after")
    def _one_of_three(self) -> FileOptions:
        if sum(value is not None for value in (self.text, self.template, self.copy_of)) != 1:
            raise ValueError("a file is given by one of text, template and copy_of")
        if self.text is not None:
            check(self.text, "text")
        return self


class LimitOptions(Options):
    """Of one episode. Whatever goes beyond ends the program; `on_failure` says what then becomes of the episode."""

    wall_s: float = Field(
        240.0,
        gt=0,
        description="seconds from its start; below training.rollout_deadline_s, which grading is within as well",
    )
    calls: int = Field(200, ge=1, description="calls of the model")
    tokens: int = Field(100_000, ge=1, description="tokens that the policy samples")
    output_mb: float = Field(8.0, gt=0, description="megabytes (10⁶ bytes) of both standard streams together")
    disk_mb: float = Field(
        1024.0, gt=0, description="megabytes (10⁶ bytes) of its work directory, HOME and temporary files"
    )
    processes: int = Field(256, ge=1, description="processes at once")
    memory_mb: float = Field(4096.0, gt=0, description="megabytes (10⁶ bytes) of memory of all its processes")


class RewardOptions(Options):
    """What scores an episode, outside the program's reach: one of the three."""

    function: str | None = Field(None, description="pkg.mod:name or ./file.py:name, called with a Case")
    command: tuple[str, ...] | None = Field(
        None, description="reads the case as JSON at its standard input, prints a score as its last line"
    )
    plugin: NamedComponent | None = Field(None, description="any reward that is installed")
    deadline_s: float = Field(
        60.0, gt=0, description="seconds for scoring one episode; copying what its program left may take half as many"
    )
    worst: float = Field(
        0.0,
        allow_inf_nan=False,
        description="score of an episode that its program made impossible to grade; or the lowest given since the run was "
        "started or resumed, if less",
    )
    on_error: Literal["worst", "fail"] = Field(
        "worst",
        description="for an episode whose reward raises, exits with an error or is late, after it has scored another one: give it "
        "the worst score, because the files that the program left may be the cause; or fail the rollout",
    )

    @model_validator(mode="after")
    def _one_of_three(self) -> RewardOptions:
        if sum(value is not None for value in (self.function, self.command, self.plugin)) != 1:
            raise ValueError("a reward is one of function, command and plugin")
        for at, text in enumerate(self.command or ()):
            check(text, f"reward.command[{at}]", GRADER_NAMES)
        self.refuse_idle(self.plugin is None, "with a plugin: it reads no files, and fails the rollout", "on_error")
        return self

    def code(self) -> tuple[str, ...]:
        """The files that it is in, as far as its options say."""
        return (self.function.rpartition(":")[0],) if self.function is not None else self.command or ()


class BaselineOptions(Options):
    """A model elsewhere that answers the program in place of the policy. Nothing of it is trained: for `atropos eval`."""

    url: str = Field(description="OpenAI-compatible, ends in /v1")
    model: str = Field(description="its name there")
    key_variable: str | None = Field(
        None, description="the environment variable of ours that holds the key; the program never sees it"
    )


class AgentOptions(Options):
    command: tuple[str, ...] | None = Field(None, description="the program and its arguments, with placeholders")
    function: str | None = Field(
        None, description="or pkg.mod:name, ./file.py:name: a function of Python, called with the task"
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="environment variables of the program, with placeholders"
    )
    files: dict[Annotated[str, AfterValidator(_below)], FileOptions] = Field(
        default_factory=dict,
        description="files that the program finds, by where they lie: in the work directory, or {home}/...",
    )
    stdin: str = Field("", description="what it reads, with placeholders")
    here: AbsolutePath = Field(
        default_factory=lambda: Path(".").resolve(), description="the folder that {here} in placeholders stands for"
    )
    tasks: AbsolutePath | None = Field(
        None,
        description="rows in a file, a folder or a pattern, as of `dataset`: id, prompt or messages, answer, and whatever else",
    )
    test_tasks: AbsolutePath | None = Field(None, description="the same, of what is held out")
    held_out: float = Field(
        0.1, ge=0, lt=1, description="the part of `tasks`, from 0 to 1, that is held out, by their ids"
    )
    tasks_from: NamedComponent | None = Field(
        None, description="or the tasks of another environment, which scores replies as well"
    )
    reward: RewardOptions | None = Field(
        None, description="what scores an episode; unset: the environment of tasks_from scores the answer"
    )
    answer: Literal["reply", "stdout"] = Field(
        "reply", description="what rewards read: the policy's last message, or what the program printed"
    )
    on_failure: Literal["grade", "fail"] = Field(
        "grade",
        description="what becomes of a program that exits with an error or goes beyond a limit: its episode is scored "
        "all the same, or fails",
    )
    limits: LimitOptions = Field(
        default_factory=LimitOptions, description="of one episode: whatever goes beyond ends the program"
    )
    concurrency: int = Field(16, ge=1, description="programs at once")
    trained: Literal["all", "main", "with_tools"] = Field(
        "all",
        description="which of its calls are trained: all; those of the task's conversation, without greetings, titles and "
        "sub-agents; or those that offer tools",
    )
    trained_agents: tuple[str, ...] = Field(
        (), description="and of those only what agents with these names call; empty: every one"
    )
    untrained_models: tuple[str, ...] = Field(
        ("untrained",), description="and none that asks for a model of one of these names"
    )
    format: str = Field(
        "auto", description="of tools and reasoning: template, or the name of a renderer; auto: what suits the model"
    )
    history: Literal["as_sampled", "as_sent"] = Field(
        "as_sampled",
        description="extend what was sampled, reasoning too; or render what the client sends, where a call that differs "
        "begins a rollout of its own",
    )
    sampling: Literal["overrule", "refuse"] = Field(
        "overrule",
        description="what a call wants otherwise than the run samples is overruled and recorded, or the call is refused",
    )
    sandbox: NamedComponent = Field(
        default_factory=lambda: Component(use="local"), description="where programs run, and its options"
    )
    network: bool = Field(False, description="to anywhere but the API")
    keep_streams: int = Field(
        1000, ge=0, description="episodes whose standard streams and accounts of tokens stay in the run's directory"
    )

    baseline: BaselineOptions | None = Field(
        None,
        description="a model elsewhere that answers in place of the policy, for `atropos eval`; unset: the policy itself",
    )

    @model_validator(mode="after")
    def _can_be(self) -> AgentOptions:
        if self.is_external:
            elsewhere = "with sandbox external: somebody else starts the program"
            self.refuse_idle(False, elsewhere, "command", "function", "files", "stdin", "network")
            self.limits.refuse_idle(False, elsewhere, "processes", "memory_mb")
        elif (self.command is None) == (self.function is None):
            raise ValueError('an agent is one of command = ["program", ...] and function = "pkg.mod:name"')
        if self.function is not None and not all(self.function.rpartition(":")[::2]):
            raise ValueError(f'function is "pkg.mod:name" or "./file.py:name", not {self.function!r}')
        if self.command is not None and not self.command:
            raise ValueError("command is empty: name the program")
        if (self.tasks is None) == (self.tasks_from is None):
            raise ValueError('tasks come from one of tasks = "file.jsonl" and tasks_from = "environment"')
        self.refuse_idle(self.tasks is not None, "with tasks_from: its environment has a test split", "test_tasks")
        self.refuse_idle(
            self.tasks is not None and self.test_tasks is None,
            "beside test_tasks, or with tasks_from",
            "held_out",
        )
        if self.tasks is not None and self.reward is None:
            raise ValueError(
                'nothing scores these tasks: add a reward, as [environment.NAME.reward] function = "grade.py:grade"'
            )
        self.refuse_idle(
            self.baseline is None,
            "with a baseline: nothing of it is trained",
            "trained", "trained_agents", "untrained_models", "history", "sampling",
        )  # fmt: skip
        for where, text in self.filled().items():
            check(text, where)
        return self

    @property
    def is_external(self) -> bool:
        """Nothing is started here: a program elsewhere takes each episode."""
        return self.sandbox.use == "external"

    def filled(self) -> Mapping[str, str]:
        """Every text of the options that has placeholders, by where it stands."""
        found = {f"command[{at}]": text for at, text in enumerate(self.command or ())}
        found |= {f"env.{name}": text for name, text in self.env.items()}
        return found | {"stdin": self.stdin}
