"""The environment `agent`: each rollout is a program of the user's, run with its own session."""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import copy
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from atropos_agent_api.config import AgentOptions
from atropos_agent_api.environment import poisoned
from atropos_agent_api.environment.baseline import Baseline, BaselineSession
from atropos_agent_api.environment.program import Files, program_of, shown_to, values_of
from atropos_agent_api.grading.case import Case
from atropos_agent_api.grading.graders import Grader
from atropos_agent_api.grading.left_files import NotGradable, copy_left
from atropos_agent_api.sandboxes.external import ExternalSandbox
from atropos_agent_api.sandboxes.preloaded import PreloadedSandbox
from atropos_agent_api.sandboxes.process import ProcessSandbox
from atropos_agent_api.sandboxes.streams import KeptStreams, tail
from atropos_agent_api.server.episodes import Episodes
from atropos_agent_api.server.running import MODEL, open_agent_server
from atropos_agent_api.sessions.options import SessionOptions, trained_calls
from atropos_agent_api.sessions.record import SessionRecord
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.sessions.sessions import Sessions
from atropos_agent_api.templates import prompt_of
from atropos_agent_api.tokens.formats import ChatFormat
from atropos_agent_api.tokens.model_formats import ModelFormats
from atropos_core import console
from atropos_core.builtin.rewards import last_reply
from atropos_core.conversation import Policy
from atropos_core.errors import AtroposError, ConfigError, DataError, DeadlineExceeded, ProcessDied, RemoteError
from atropos_core.guards.endings import raise_first
from atropos_core.interfaces import Environment, Finding
from atropos_core.rollouts.runner import failed_by
from atropos_core.sandboxes import Exit, Network, RunningProgram, Sandbox
from atropos_core.storage.tempdirs import owned_prefix, sweep
from atropos_core.turn_rewards import placed, with_turns
from atropos_core.types import Episode, Score, Split, Task
from atropos_env_kit.task_files import read_tasks, split_tasks
from atropos_http_server.server import RunningServer

MOST_ANSWER_BYTES = 1 << 16  # of a program's output that a reward reads
GRADING = "agent-grading"  # prefix of the temporary directories that rewards read


class Agent(Environment):
    """Any number of rollouts at once, of which `concurrency` have a running program."""

    def __init__(
        self,
        options: AgentOptions,
        *,
        tasks_from: Environment | None,
        grader: Grader,
        sandbox: Sandbox,
        formats: ModelFormats,
        streams: KeptStreams,
        context_tokens: int,
        in_order: bool,
        baseline: Baseline | None = None,
    ) -> None:
        """`context_tokens`: context length of the model; 0 if unknown. `in_order`: in a deterministic run, every rollout must
        reach its call before any is answered, so a rollout may not wait for another to end."""
        self.at_once = None if in_order else options.concurrency
        self._options = options
        self._tasks_from = tasks_from
        self._grader = grader
        self._sandbox = sandbox
        if isinstance(sandbox, ExternalSandbox):
            self.waits_for = "a program that you start yourself (sandbox external)"
        self._formats = formats
        self._baseline = baseline
        self._streams = streams
        self._files = Files(options.files)
        self._worst = 0.0 if options.reward is None else options.reward.worst  # or the lowest score so far
        self._errors_are_worst = (
            grader.reads_files and options.reward is not None and options.reward.on_error == "worst"
        )
        self._has_scored = self._has_warned = False
        self._told_side_calls = self._told_no_main = False
        self._sessions = Sessions()
        self._server: RunningServer | None = None
        self._split: dict[Split, list[Task]] | None = None
        self._network: Network = "host" if options.network else "api"
        self._room: AbstractAsyncContextManager[object] = (
            nullcontext() if in_order else asyncio.Semaphore(options.concurrency)
        )
        self._session_options = SessionOptions(
            history=options.history,
            client_sampling=options.sampling,
            trained_calls=trained_calls(options.trained, options.trained_agents, options.untrained_models),
            only_main=options.trained == "main",
            max_calls=options.limits.calls,
            max_sampled_tokens=options.limits.tokens,
            context_tokens=context_tokens,
        )

    def source(self) -> str:
        return str(self._options.tasks) if self._tasks_from is None else self._tasks_from.source()

    async def open(self) -> None:
        sweep(GRADING)
        self._streams.open()
        if self._tasks_from is not None:
            await self._tasks_from.open()
        await self._grader.open()
        await self._sandbox.open()
        self._network = self._allowed_network()
        external = self._external
        if external is None:
            self._server = await open_agent_server(self._sessions, MODEL)
            return
        self._server = await open_agent_server(
            self._sessions,
            MODEL,
            host=external.host,
            port=external.port,
            episodes=Episodes(external.queue, external.token),
        )
        external.announce(self._server.url)

    @cached_property
    def slot(self) -> AbstractAsyncContextManager[object]:
        """If programs elsewhere take episodes, a rollout begins only when one is waiting for it."""
        if self._external is None:
            return super().slot
        return self._external.queue.slot(self._options.concurrency)

    @property
    def _external(self) -> ExternalSandbox | None:
        return self._sandbox if isinstance(self._sandbox, ExternalSandbox) else None

    def _allowed_network(self) -> Network:
        """Raises ConfigError if the named sandbox cannot restrict a program to the API."""
        if self._external is not None:
            return "host"  # the user who starts the program controls its network
        wanted: Network = "host" if self._options.network else "api"
        if wanted in self._sandbox.networks:
            return wanted
        if not self._options.changed("sandbox"):
            return "host"  # the default sandbox uses what this machine has, and reported it when it was opened
        raise ConfigError(
            f"sandbox {self._options.sandbox.use!r} cannot restrict a program to the API.",
            remedy="Set network = true, or use a sandbox that can: bubblewrap, docker.",
        )

    async def close(self) -> None:
        server, self._server = self._server, None
        closing = [self._sandbox.close(), self._grader.close()]
        closing += [server.close()] if server is not None else []
        closing += [self._baseline.close()] if self._baseline is not None else []
        closing += [self._tasks_from.close()] if self._tasks_from is not None else []
        raise_first(await asyncio.gather(*closing, return_exceptions=True))

    def tasks(self, split: Split) -> Sequence[Task]:
        if self._tasks_from is not None:
            return self._tasks_from.tasks(split)
        if self._split is None:
            self._split = self._read_tasks()
        return self._split[split]

    def _read_tasks(self) -> dict[Split, list[Task]]:
        options = self._options
        assert options.tasks is not None, "the options have one of the two"
        if options.test_tasks is None:
            return split_tasks(read_tasks(options.tasks), options.held_out)
        return {"train": read_tasks(options.tasks), "test": read_tasks(options.test_tasks)}

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        async with self._room:
            folder = self._streams.begin(task.id)
            try:
                return await self._rollout_in(folder, task, policy, seed=seed)
            finally:
                self._streams.end(folder)

    async def _rollout_in(self, folder: Path, task: Task, policy: Policy, *, seed: int) -> Episode:
        """`folder`: the place for the program's output."""
        format = await self._formats.of(policy)
        session = self._sessions.add(self._session(policy, format, task, seed))
        try:
            return await self._run(task, session, seed, folder)
        finally:
            self._sessions.end(session, "its episode has ended")

    def _session(self, policy: Policy, format: ChatFormat, task: Task, seed: int) -> Session:
        if self._baseline is None:
            prompt = prompt_of(task)
            return Session(policy, format, self._session_options, seed=seed, name=task.id, prompt=prompt)
        return BaselineSession(self._baseline, policy, format, self._session_options, seed=seed, name=task.id)

    async def _run(self, task: Task, session: Session, seed: int, folder: Path) -> Episode:
        assert self._server is not None, "an environment is opened before it is used"
        name, url = f"episode-{secrets.token_hex(8)}", f"{self._server.url}/s/{session.id}"
        values = values_of(self._options, task, self._sandbox.inside(name, url, self._network), session.key, seed)
        program = program_of(
            self._options,
            self._files,
            task,
            values,
            name=name,
            streams=folder,
            network=self._network,
            api_url=url,
            shown=shown_to(self._options),
        )
        running = await self._sandbox.start(program)
        try:
            ended = await running.wait()
            self._sessions.end(session, "its program has ended")
            record = await asyncio.to_thread(session.record)
            account = _account(task, record, ended)
            await asyncio.to_thread(_write, account, folder / "account.json")
            self._say_of_side_calls(task, record)
            self._check(session, record, ended, folder)
            return await self._scored(task, record, ended, running, folder, account)
        finally:
            await running.close()

    def _say_of_side_calls(self, task: Task, record: SessionRecord) -> None:
        """Report side calls once in a run, and warn once if they cannot be told from the others."""
        calls, tokens = (int(record.metrics.get(f"agent/side_{what}", 0)) for what in ("calls", "tokens"))
        if calls and not self._told_side_calls:
            self._told_side_calls = True
            becomes = (
                'They are left out (trained = "main")'
                if self._session_options.only_main
                else 'They are trained with its reward: trained = "main" or untrained_models leaves such calls out'
            )
            if record.ends_aside and self._options.answer == "reply":
                becomes += ". Such a call gave the last reply, which is what rewards read"
            console.note(
                "side calls",
                f"{calls} of {int(record.metrics['agent/calls'])} calls, with {tokens:,} sampled tokens, are outside task {task.id!r}; "
                f"the first begins with {record.side}. {becomes}.",
            )
        if not record.shows_task and record.rollouts and self._session_options.only_main and not self._told_no_main:
            self._told_no_main = True
            console.warn(
                f"all calls of task {task.id!r} are trained: none shows the task's prompt, so it is unknown which conversation is "
                'the task\'s (trained = "main"). Have the program pass the prompt on unchanged, or name what to leave out with '
                "untrained_models."
            )

    def _check(self, session: Session, record: SessionRecord, ended: Exit, folder: Path) -> None:
        """Raises for an episode that is a failed rollout."""
        failed = ended.code != 0 or ended.limit is not None
        if session.failure is not None and (failed or isinstance(session.failure, ProcessDied)):
            raise session.failure
        if not record.rollouts:
            raise DataError(f"the program made no call that is trained; {_how(ended, folder)}.", remedy=_where(folder))
        if failed and self._options.on_failure == "fail":
            raise DataError(f"the program failed: {_how(ended, folder)}.", remedy=_where(folder))

    async def _scored(
        self,
        task: Task,
        record: SessionRecord,
        ended: Exit,
        running: RunningProgram,
        folder: Path,
        account: dict[str, Any],
    ) -> Episode:
        episode = Episode(
            rollouts=record.rollouts,
            score=0.0,
            metrics={
                **record.metrics,
                "agent/seconds": ended.seconds,
                "agent/programs_failed": float(ended.code != 0),
                "agent/limits_reached": float(ended.limit is not None),
                "agent/left_running": float(ended.left_running or 0),
            },
            messages=record.messages,
            finish=record.finish,
        )
        why_not = ""
        try:
            score = await self._score(task, episode, ended, running, folder)
            self._worst, self._has_scored = min(self._worst, score.value), True
        except (
            NotGradable,
            RecursionError,
        ) as error:  # blamed on the program: failing the rollout would let it escape a bad score
            why_not = str(error)
            score = Score(self._worst, correct=False)
            (folder / "account.json").write_text(json.dumps({**account, "not_graded": why_not}, indent=1, default=str))
        if score.turns is not None and record.account.turns:  # a baseline's tokens are not sampled
            turns = placed(record.rollouts, score.turns, record.account.turns)
            episode = replace(episode, rollouts=with_turns(record.rollouts, turns))
        return replace(
            episode,
            score=score.value,
            correct=score.correct,
            parts=dict(score.parts),
            metrics={**episode.metrics, **score.metrics, "agent/not_graded": float(bool(why_not))},
        )

    async def _score(self, task: Task, episode: Episode, ended: Exit, running: RunningProgram, folder: Path) -> Score:
        answer = last_reply(episode)
        if self._options.answer == "stdout":
            answer = _printed(folder / "stdout.txt")
            said = {"role": "assistant", "content": answer}
            episode = replace(episode, messages=(*episode.messages, said))
        with tempfile.TemporaryDirectory(prefix=owned_prefix(GRADING)) as directory:
            work = Path(directory) / secrets.token_hex(8)  # no link can point here in advance, as ../work/x could
            if self._grader.reads_files and (reward := self._options.reward) is not None:
                most, within_s = int(self._options.limits.disk_mb * 1e6), reward.deadline_s / 2
                await asyncio.to_thread(copy_left, await running.work(), work, most, within_s)
            case = Case(task, episode.messages, answer, ended.code, ended.limit or "", work)
            try:
                return await self._grader.score(case, episode)
            except (DataError, DeadlineExceeded, RemoteError) as error:
                if not (self._errors_are_worst and self._has_scored):
                    raise
                if not self._has_warned:
                    self._has_warned = True
                    console.warn(
                        f"an episode whose reward failed gets the worst score, and so will later ones: {failed_by(error, 'reward').cause} "
                        "The metric agent/not_graded counts them."
                    )
                raise NotGradable(str(error)) from error

    # -- `atropos check`

    async def own_findings(self, task: Task, policy: Policy) -> Sequence[Finding]:
        """Run poisoned programs instead of the user's: none may get a reward that it did not earn, or outlive its episode."""
        sandbox = self._sandbox
        if self._external is not None:
            remedy = 'Check the program with a sandbox that starts it: command = [...], sandbox = "local".'
            return [Finding("poisoned programs", None, "sandbox external cannot start one", remedy)]
        if isinstance(sandbox, PreloadedSandbox):  # which only runs the user's function
            sandbox = ProcessSandbox()
            await sandbox.open()
        grader = self._options.reward.code() if self._options.reward is not None else ()
        try:
            with tempfile.TemporaryDirectory(prefix=owned_prefix(GRADING)) as directory:
                streams = KeptStreams(Path(directory), 100)
                streams.open()
                ran = partial(self._run_poisoned, task, policy, sandbox, streams)
                honest = await ran(poisoned.command("")[0])
                findings = []
                for name, (program, limit) in poisoned.PROGRAMS.items():
                    command, mark = poisoned.command(program, *grader)
                    findings.append(poisoned.finding(name, honest, await ran(command), limit, mark))
                secret = secrets.token_hex(16)
                owner, spy = poisoned.command(poisoned.SECRET, secret)[0], poisoned.command(poisoned.SPY, secret)[0]
                _, spied = await asyncio.gather(ran(owner), ran(spy))
                return [*findings, poisoned.neighbour_finding(spied, "api" in sandbox.networks)]
        finally:
            if sandbox is not self._sandbox:
                await sandbox.close()

    async def _run_poisoned(
        self, task: Task, policy: Policy, sandbox: Sandbox, streams: KeptStreams, command: Sequence[str]
    ) -> poisoned.Ran:
        changed = {
            "command": tuple(command),
            "function": None,
            "stdin": "",
            "limits": poisoned.LIMITS,
            "on_failure": "grade",
        }
        other = copy(self)
        other._options = self._options.model_copy(update=changed)
        other._sandbox = sandbox
        folder, score = streams.begin(task.id), None
        try:
            score = (await other._rollout_in(folder, task, policy, seed=1)).score
        except AtroposError:
            pass  # a failed rollout has no reward
        account = json.loads((folder / "account.json").read_text())
        calls = account["metrics"]["agent/calls"]
        return poisoned.Ran(score, account["exit"]["limit"] or "", calls, tail(folder / "stdout.txt"))


def _account(task: Task, record: SessionRecord, ended: Exit) -> dict[str, Any]:
    """The fate of each token, for people and for audits."""
    return {"task": task.id, "exit": asdict(ended), **record.as_json()}


def _write(account: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(account, indent=1, default=str))


def _how(ended: Exit, folder: Path) -> str:
    """One line: how the program ended, and the last line of its output."""
    if ended.limit is not None:
        how = f"it exceeded its limit of {ended.limit.replace('_', ' ')}"
    elif ended.signal is not None:
        how = f"it was ended by signal {ended.signal}"
    else:
        how = f"it ended with exit code {ended.code}"
    last = (tail(folder / "stderr.txt") or tail(folder / "stdout.txt")).splitlines()[-1:]
    return f"{how} after {ended.seconds:.1f} s" + (f" and wrote {last[0][:200]!r}" if last else "")


def _where(folder: Path) -> str:
    return f"Its output is in {folder}"


def _printed(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - MOST_ANSWER_BYTES, 0))
        return file.read().decode(errors="replace").strip()
