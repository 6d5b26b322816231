"""Options of the environment `agent`: which program, on which tasks, within which limits, and who scores it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from atropos_agent_api.environment.templates import GRADER_NAMES, check
from atropos_core.config.component import Component
from atropos_core.plugins.provider import Options


def _absolute(path: Path) -> Path:
    return path.expanduser().resolve()


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


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]  # a resumed run may start elsewhere
NamedComponent = Annotated[Component, BeforeValidator(_named)]


class FileOptions(Options):
    """One file that the program finds: one of the three."""

    text: str | None = None  # its text, with placeholders
    template: AbsolutePath | None = None  # a text file, with placeholders
    copy_of: AbsolutePath | None = None  # a file or folder, as it is

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
        240.0, gt=0
    )  # from its start; below training.rollout_deadline_s, which grading is within as well
    calls: int = Field(200, ge=1)  # of the model
    tokens: int = Field(100_000, ge=1)  # that the policy samples
    output_mb: float = Field(8.0, gt=0)  # of both standard streams together
    disk_mb: float = Field(1024.0, gt=0)  # of its work directory, HOME and temporary files
    processes: int = Field(256, ge=1)  # at once
    memory_mb: float = Field(4096.0, gt=0)  # of all its processes


class RewardOptions(Options):
    """What scores an episode, outside the program's reach: one of the three."""

    function: str | None = None  # "pkg.mod:name" or "./file.py:name", called with a Case
    command: tuple[str, ...] | None = (
        None  # reads the case as JSON at its standard input, prints a score as its last line
    )
    plugin: NamedComponent | None = None  # any reward that is installed
    deadline_s: float = Field(60.0, gt=0)

    @model_validator(mode="after")
    def _one_of_three(self) -> RewardOptions:
        if sum(value is not None for value in (self.function, self.command, self.plugin)) != 1:
            raise ValueError("a reward is one of function, command and plugin")
        for at, text in enumerate(self.command or ()):
            check(text, f"reward.command[{at}]", GRADER_NAMES)
        return self

    def code(self) -> tuple[str, ...]:
        """The files that it is in, as far as its options say."""
        return (self.function.rpartition(":")[0],) if self.function is not None else self.command or ()


class BaselineOptions(Options):
    """A model elsewhere that answers the program in place of the policy. Nothing of it is trained: for `atropos eval`."""

    url: str  # OpenAI-compatible, ends in /v1
    model: str  # its name there
    key_variable: str | None = None  # the environment variable of ours that holds the key; the program never sees it


class AgentOptions(Options):
    command: tuple[str, ...] | None = None  # the program and its arguments, with placeholders
    function: str | None = None  # or "pkg.mod:name", "./file.py:name": a function of Python, called with the task
    env: dict[str, str] = Field(default_factory=dict)  # environment variables of the program, with placeholders
    files: dict[Annotated[str, AfterValidator(_below)], FileOptions] = Field(
        default_factory=dict
    )  # by where they lie: in the work directory, or "{home}/..."
    stdin: str = ""  # what it reads, with placeholders
    here: AbsolutePath = Field(default_factory=lambda: Path(".").resolve())  # {here} in placeholders
    tasks: AbsolutePath | None = None  # JSONL: id, prompt or messages, answer, and whatever else
    test_tasks: AbsolutePath | None = None  # the same, of what is held out
    held_out: float = Field(0.1, ge=0, lt=1)  # the share of `tasks` that is held out, by their ids
    tasks_from: NamedComponent | None = None  # or the tasks of another environment, which scores replies as well
    reward: RewardOptions | None = None  # None: the environment of tasks_from scores the answer
    answer: Literal["reply", "stdout"] = (
        "reply"  # what rewards read: the policy's last message, or what the program printed
    )
    on_failure: Literal["grade", "fail"] = "grade"  # of a program that exits with an error or goes beyond a limit
    limits: LimitOptions = Field(default_factory=LimitOptions)
    concurrency: int = Field(16, ge=1)  # programs at once
    trained: Literal["all", "with_tools"] = "all"  # which of its calls are
    trained_agents: tuple[str, ...] = ()  # and of those only what agents with these names call; none: every one
    format: str = "auto"  # of tools and reasoning: "template", or the name of a renderer; auto: what suits the model
    history: Literal["as_sampled", "as_sent"] = "as_sampled"
    sampling: Literal["overrule", "refuse"] = "overrule"  # what a call wants otherwise than the run samples
    sandbox: NamedComponent = Field(default_factory=lambda: Component(use="local"))
    network: bool = False  # to anywhere but the API
    keep_streams: int = Field(
        1000, ge=0
    )  # episodes whose standard streams and accounts of tokens stay in the run's directory

    baseline: BaselineOptions | None = None

    @model_validator(mode="after")
    def _can_be(self) -> AgentOptions:
        if (self.command is None) == (self.function is None):
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
            "trained", "trained_agents", "history", "sampling",
        )  # fmt: skip
        for where, text in self.filled().items():
            check(text, where)
        return self

    def filled(self) -> Mapping[str, str]:
        """Every text of the options that has placeholders, by where it stands."""
        found = {f"command[{at}]": text for at, text in enumerate(self.command or ())}
        found |= {f"env.{name}": text for name, text in self.env.items()}
        return found | {"stdin": self.stdin}
