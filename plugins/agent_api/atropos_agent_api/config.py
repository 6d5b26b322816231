"""Options of the environment `agent`: the program, its tasks, its limits, and its reward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from atropos_agent_api.templates import GRADER_NAMES, check
from atropos_core.config.component import Component
from atropos_core.plugins.option_paths import AbsolutePath
from atropos_core.plugins.options import Options


def _named(value: Any) -> Any:
    """`{use = "gsm8k"}` for `"gsm8k"`."""
    return {"use": value} if isinstance(value, str) else value


def _below(target: str) -> str:
    """Check the path of a file for the program."""
    path = PurePosixPath(target.removeprefix("{home}/"))
    if path.is_absolute() or ".." in path.parts or not path.parts or "{" in str(path):
        raise ValueError(
            f'a file must be in the work directory, as "notes/a.txt", or in HOME, as "{{home}}/.agent.json", not at {target!r}'
        )
    return target


NamedComponent = Annotated[Component, BeforeValidator(_named)]


class FileOptions(Options):
    """A file for the program, given in one of three ways."""

    text: str | None = Field(None, description="its text, with placeholders")
    template: AbsolutePath | None = Field(None, description="a text file, with placeholders")
    copy_of: AbsolutePath | None = Field(None, description="a file or folder to copy unchanged")

    @model_validator(mode="after")
    def _one_of_three(self) -> FileOptions:
        if sum(value is not None for value in (self.text, self.template, self.copy_of)) != 1:
            raise ValueError("give a file by one of text, template and copy_of")
        if self.text is not None:
            check(self.text, "text")
        return self


class LimitOptions(Options):
    """Limits of one episode. A program that exceeds one is ended; `on_failure` decides if the episode is still scored."""

    wall_s: float = Field(
        240.0,
        gt=0,
        description="seconds from the start; below training.rollout_deadline_s, which includes grading",
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
    """The reward that scores an episode, out of the program's reach: one of the three."""

    function: str | None = Field(None, description="pkg.mod:name or ./file.py:name, called with a Case")
    command: tuple[str, ...] | None = Field(
        None,
        description="a program that reads the case as JSON on standard input and prints the score as its last line",
    )
    plugin: NamedComponent | None = Field(None, description="any installed reward")
    deadline_s: float = Field(
        60.0, gt=0, description="seconds to score one episode; copying the program's files may take half as long again"
    )
    worst: float = Field(
        0.0,
        allow_inf_nan=False,
        description="score of an episode whose program made grading impossible; or the lowest score since the run was "
        "started or resumed, if that is lower",
    )
    on_error: Literal["worst", "fail"] = Field(
        "worst",
        description="if the reward raises, exits with an error or is late, after it has scored another episode: worst gives the "
        "worst score, since the program's files may be the cause; fail fails the rollout",
    )

    @model_validator(mode="after")
    def _one_of_three(self) -> RewardOptions:
        if sum(value is not None for value in (self.function, self.command, self.plugin)) != 1:
            raise ValueError("give a reward as one of function, command and plugin")
        for at, text in enumerate(self.command or ()):
            check(text, f"reward.command[{at}]", GRADER_NAMES)
        self.refuse_idle(self.plugin is None, "with a plugin: it reads no files, and fails the rollout", "on_error")
        return self

    def code(self) -> tuple[str, ...]:
        """The files with the reward's code, as far as its options name them."""
        return (self.function.rpartition(":")[0],) if self.function is not None else self.command or ()


class BaselineOptions(Options):
    """A remote model that answers the program instead of the policy, for `atropos eval`. Its replies are not trained."""

    url: str = Field(description="OpenAI-compatible URL that ends in /v1")
    model: str = Field(description="the model's name on that server")
    key_variable: str | None = Field(
        None, description="environment variable of Atropos that holds the key; the program does not see it"
    )


class AgentOptions(Options):
    command: tuple[str, ...] | None = Field(None, description="the program and its arguments, with placeholders")
    function: str | None = Field(
        None, description="or a Python function, pkg.mod:name or ./file.py:name, called with the task"
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="environment variables of the program, with placeholders"
    )
    files: dict[Annotated[str, AfterValidator(_below)], FileOptions] = Field(
        default_factory=dict,
        description="files for the program, by path: in the work directory, or {home}/...",
    )
    stdin: str = Field("", description="the program's standard input, with placeholders")
    here: AbsolutePath = Field(
        default_factory=lambda: Path(".").resolve(), description="folder that {here} in placeholders stands for"
    )
    tasks: AbsolutePath | None = Field(
        None,
        description="rows in a file, a folder or a pattern, as for `dataset`: id, prompt or messages, answer, and other fields",
    )
    test_tasks: AbsolutePath | None = Field(None, description="the same for the held-out tasks")
    held_out: float = Field(0.1, ge=0, lt=1, description="share of `tasks`, from 0 to 1, to hold out, by their ids")
    tasks_from: NamedComponent | None = Field(
        None, description="or the environment whose tasks to use; it can also score the replies"
    )
    reward: RewardOptions | None = Field(
        None, description="what scores an episode; unset: the environment of tasks_from scores the answer"
    )
    answer: Literal["reply", "stdout"] = Field(
        "reply", description="what rewards read: the policy's last message, or the program's standard output"
    )
    on_failure: Literal["grade", "fail"] = Field(
        "grade",
        description="if a program exits with an error or exceeds a limit: grade scores its episode anyway, fail fails "
        "the rollout",
    )
    limits: LimitOptions = Field(
        default_factory=LimitOptions, description="limits of one episode: a program that exceeds one is ended"
    )
    concurrency: int = Field(16, ge=1, description="programs at once")
    trained: Literal["all", "main", "with_tools"] = Field(
        "all",
        description="calls to train. all; main: only those of the task's conversation, without greetings, titles and "
        "sub-agents; with_tools: only those that offer tools",
    )
    trained_agents: tuple[str, ...] = Field(
        (), description="train only calls of agents with these names; empty: of every agent"
    )
    untrained_models: tuple[str, ...] = Field(
        ("untrained",), description="never train a call that asks for a model with one of these names"
    )
    format: str = Field(
        "auto",
        description="format of tools and reasoning: template, or the name of a renderer; auto: what fits the model",
    )
    history: Literal["as_sampled", "as_sent"] = Field(
        "as_sampled",
        description="as_sampled: extend what was sampled, with the reasoning. as_sent: render what the client sends; a call that "
        "differs from what was sampled starts a new rollout",
    )
    sampling: Literal["overrule", "refuse"] = Field(
        "overrule",
        description="if a call asks for other sampling than the run's: overrule and record it, or refuse the call",
    )
    sandbox: NamedComponent = Field(
        default_factory=lambda: Component(use="local"), description="sandbox in which programs run, and its options"
    )
    network: bool = Field(False, description="allow the program to reach more than the API")
    keep_streams: int = Field(
        1000,
        ge=0,
        description="number of latest episodes whose standard streams and token accounts stay in the run's directory",
    )

    baseline: BaselineOptions | None = Field(
        None,
        description="a remote model that answers instead of the policy, for `atropos eval`; unset: the policy",
    )

    @model_validator(mode="after")
    def _can_be(self) -> AgentOptions:
        if self.is_external:
            elsewhere = "with sandbox external, because Atropos does not start the program"
            self.refuse_idle(False, elsewhere, "command", "function", "files", "stdin", "network")
            self.limits.refuse_idle(False, elsewhere, "processes", "memory_mb")
        elif (self.command is None) == (self.function is None):
            raise ValueError('give an agent as one of command = ["program", ...] and function = "pkg.mod:name"')
        if self.function is not None and not all(self.function.rpartition(":")[::2]):
            raise ValueError(f'function must be "pkg.mod:name" or "./file.py:name", not {self.function!r}')
        if self.command is not None and not self.command:
            raise ValueError("command is empty: name the program")
        if (self.tasks is None) == (self.tasks_from is None):
            raise ValueError('tasks come from one of tasks = "file.jsonl" and tasks_from = "environment"')
        self.refuse_idle(self.tasks is not None, "with tasks_from: its environment has a test split", "test_tasks")
        self.refuse_idle(
            self.tasks is not None and self.test_tasks is None,
            "with test_tasks or tasks_from",
            "held_out",
        )
        if self.tasks is not None and self.reward is None:
            raise ValueError(
                'nothing scores these tasks: add a reward, as [environment.NAME.reward] function = "grade.py:grade"'
            )
        self.refuse_idle(
            self.baseline is None,
            "with a baseline, which is not trained",
            "trained", "trained_agents", "untrained_models", "history", "sampling",
        )  # fmt: skip
        for where, text in self.filled().items():
            check(text, where)
        return self

    def check_files(self) -> None:
        from atropos_env_kit.row_files import check_files

        for path in (self.tasks, self.test_tasks):
            if path is not None:
                check_files(path)

    @property
    def is_external(self) -> bool:
        """True if programs elsewhere take the episodes, and nothing is started here."""
        return self.sandbox.use == "external"

    def filled(self) -> Mapping[str, str]:
        """Every text of the options that has placeholders, by its option."""
        found = {f"command[{at}]": text for at, text in enumerate(self.command or ())}
        found |= {f"env.{name}": text for name, text in self.env.items()}
        return found | {"stdin": self.stdin}
