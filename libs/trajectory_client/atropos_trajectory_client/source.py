"""Groups from remote workers, over the trajectory API. The curriculum stays here: draws are offered, and groups come back."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.config.run_file import ApiSection, RunConfig
from atropos_core.console.waits import Wait, waiting
from atropos_core.errors import DeadlineExceeded
from atropos_core.guards.open_component import in_one_line
from atropos_core.interfaces import Curriculum, ModelInfo, TaskSource
from atropos_core.observe.profile import Profile
from atropos_core.rollouts.producer import PATIENCE, no_progress, refuse_no_draws
from atropos_core.rollouts.source import LeasedGroup, Source, say_other_tasks, size_warning
from atropos_core.storage.atomic import write_whole
from atropos_core.storage.checkpoint import taking_up
from atropos_core.types import Draw, ScoredGroup
from atropos_trajectory_client.client import OTHER_TIMELINE, Api, SessionSpec, TrainerSession
from atropos_trajectory_client.timelines import sampled_after, without_versions_after

LOOK_S = 1.0  # between two looks at who is there, while workers are awaited
POLL_S = 10.0  # of waiting for groups before another look at who is there


class ApiSource(Source):
    """One session of the API's one trainer. Groups of old environments, which have no draw, each get a draw below 0.

    A run that resumes from a checkpoint gets all uncommitted groups of the run before it, also those sampled from weights newer than
    the checkpoint's. Those weights are lost, and their version now means other weights: such tokens are neither fresh nor of an age
    that `max_staleness` could bound. So, as in a run without an API, the draws of such groups are run again: reported, and counted
    as "other_timeline". A group without a draw cannot be run again: it is trained, with an unknown version.
    """

    def __init__(
        self,
        config: RunConfig,
        curriculum: Curriculum,
        model: ModelInfo,
        directory: Path,
        profile: Profile | None = None,
        *,
        context_tokens: int = 0,
    ) -> None:
        """`context_tokens`: of the model; 0: unknown. Passed on to old environments."""
        super().__init__(curriculum)
        assert config.api is not None, "the run file has a section [api]"
        training = config.training
        self._section: ApiSection = config.api
        self._other_tasks = config.checkpoint.other_tasks
        self._tasks: dict[
            str, tuple[int, list[str]]
        ] = {}  # of each environment drawn from: how many, and their digests
        self._resuming = False
        self._named = {name: environment.weight for name, environment in config.environment.items()}
        self._spec = SessionSpec(
            holder=_holder(directory),
            group_size=training.group_size,
            min_group=training.min_group,
            sampling=config.sampling.record(),
            batch_groups=training.groups_per_step,
            tokenizer=model.tokenizer,
            vocabulary=model.vocabulary,
            model=config.model,
            date=str(config.date or ""),
            max_staleness=training.max_staleness,
            max_token_len=context_tokens,
            deadline_s=training.rollout_deadline_s,
        )
        self._api = Api(self._section.url, self._section.token(), profile=profile, patience=config.watch.patience())
        self._session: TrainerSession | None = None
        self._sources: dict[str, TaskSource] = {}  # with a worker at present
        self._open: dict[int, Draw] = {}  # drawn, and nothing has come of them yet
        self._unoffered: list[Draw] = []
        self._ahead: set[int] = set()  # draws whose groups were leased before the curriculum drew them
        self._version = 0  # that the engines sample from
        self._base: int | None = None  # the version that this session began with: of its checkpoint
        self._suspects: set[int] = set()  # draws that were being run when it began
        self._warned_of_lost = False
        self._adopted = False
        self._target = 0
        self._trained: list[int] = []  # hub ids that the server does not know to be inside a checkpoint
        self._failed_in_a_row = 0

    @property
    def commit_due(self) -> bool:
        return self._session is not None and self._session.commit_due

    async def open(self, state: Mapping[str, Any] | None) -> None:
        """Open the session and wait for workers: of each environment that the run file names, or of any. Raises DeadlineExceeded if
        they do not come."""
        state = state or {}
        with taking_up("what the checkpoint says of the trajectory API"):
            self._tasks = {name: (int(size), digests) for name, (size, digests) in state.get("tasks", {}).items()}
            self._resuming = bool(self._tasks)
            self._version, self._ahead = int(state.get("version", 0)), set(map(int, state.get("ahead", ())))
            trained, hub_id = list(map(int, state.get("trained", ()))), str(state.get("hub_id", ""))
        self._session = await TrainerSession.open(
            self._api,
            replace(self._spec, version=self._version),
            committed=trained,
            hub_id=hub_id,
        )
        self.broken = self._session.lost
        self._suspects = set(self._session.draws_in_progress)
        with waiting("workers", said=True) as wait:
            await self._await_workers(self._session, wait)
        self._resuming = False

    async def add_engine(self, url: str) -> None:
        """Let workers sample from the engine behind this URL."""
        await self._here.add_engine(url)

    def request(self, groups: int) -> None:
        self._target = groups  # `lease` offers them

    async def lease(self, n: int, version: int, deadline_s: float) -> list[LeasedGroup]:
        until = time.monotonic() + deadline_s
        if self._base is None:
            self._base = version
        leased: list[LeasedGroup] = []
        why: str | None = None
        while len(leased) < n:
            left = until - time.monotonic()
            if left <= 0:
                await self._here.give_back([one.id for one in leased])
                raise DeadlineExceeded(
                    f"{len(leased)} of {n} groups came from {self._section.url} within {deadline_s:g} s"
                    + (f": {why}" if why else "."),
                    remedy="Is there a worker of each environment? `atropos env NAME --api URL` starts one.",
                )
            await self._look(await self._here.fetch_environments())
            await self._offer(self._target - len(leased))
            answer = await self._here.lease(n - len(leased), version, min(POLL_S, left))
            why = answer.why
            for group in answer.failed:
                self._failed(group, self._open.pop(group.draw.id, None))
                self._failed_in_a_row += 1
                if self._failed_in_a_row >= PATIENCE * max(self._target, 1):
                    raise no_progress(self._failed_in_a_row, group)
            for number, cause in answer.dropped:
                self._dropped(cause, self._open.pop(number, None))
            again: list[tuple[int, Draw]] = []
            for number, group in answer.entries:
                self._failed_in_a_row = 0
                newest = self._newest(number, group, version)
                if group.draw.id >= 0 and sampled_after(group, newest):
                    again.append((number, group.draw))
                else:
                    leased.append(
                        LeasedGroup(number, self._taken(number, self._of_this_timeline(group, newest, version)))
                    )
            if again:
                await self._run_again(again)
        return leased

    async def _mark_trained(self, ids: Sequence[int]) -> None:
        self._here.trained(ids)
        self._trained += ids

    def state(self) -> Mapping[str, Any]:
        return {
            "trained": list(self._trained),
            "hub_id": self._here.hub_id,
            "version": self._version,
            "ahead": sorted(self._ahead),
            "tasks": self._tasks,
        }

    async def commit(self) -> None:
        await self._here.commit(self._trained)
        self._trained = []

    async def publish(self, version: int) -> None:
        self._version = version
        await self._here.set_version(version)

    async def stop(self) -> None:
        """Let workers finish their rollouts; their groups wait for the resumed run."""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._api.close()

    @property
    def _here(self) -> TrainerSession:
        assert self._session is not None, "open() comes first"
        return self._session

    async def _await_workers(self, session: TrainerSession, wait: Wait) -> None:
        wait_s, shown = self._section.wait_s, ""
        until = time.monotonic() + wait_s
        while True:
            found = await session.fetch_environments()
            sending = {name for name, entry in found.items() if entry["workers"]}
            sending |= set((await self._api.status())["old"])  # they send groups without draws, and have no tasks
            missing = [name for name in self._named if name not in sending]
            if not missing and sending:
                break
            waiting = f"a worker of {' and of '.join(missing) or 'any environment'} at {self._section.url}"
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"waited {wait_s:g} s for {waiting}.",
                    remedy=f"Start one: atropos env NAME --api {self._section.url}; or wait longer: --set api.wait_s=3600",
                )
            if waiting != shown:
                shown = wait.what = waiting
                console.say(f"waiting for {waiting} ({wait_s:g} s at most)")
            await asyncio.sleep(LOOK_S)
        await self._look(found)

    async def _look(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Draw from the environments that have workers now. An old environment has no tasks to draw."""
        sources = {
            name: TaskSource(entry["tasks"], self._named.get(name, entry["weight"]))
            for name, entry in sorted(found.items())
            if entry["workers"] and entry["tasks"] and (name in self._named or not self._named)
        }
        for name, source in sources.items():
            self._look_at_tasks(name, source.size, found[name].get("digests", ()))  # older servers say none
        if sources == self._sources:
            return
        for name in self._sources.keys() - sources.keys():
            console.warn(f"environment {name!r} has no worker any more: the run continues without it until one comes.")
        for name in sources.keys() - self._sources.keys():
            console.say(
                f"environment {name!r}: {sources[name].size:,} training tasks, by workers at {self._section.url}"
            )
        self._sources = sources
        if any(source.weight > 0 for source in sources.values()):
            with in_one_line("the curriculum could not open"):
                self.curriculum.open(sources)

    def _look_at_tasks(self, name: str, size: int, digests: Sequence[str]) -> None:
        """Warn of a worker whose tasks differ from those that the run has drawn from. In a resumed run, raise CheckpointError."""
        had_size, known = self._tasks.get(name, (size, []))
        if had_size != size:
            console.warn(size_warning(name, size, had_size))
        for digest in digests:
            if known and had_size == size and digest not in known:
                fact = (
                    f"a worker of environment {name!r} has other training tasks than those that the run has drawn from."
                )
                say_other_tasks(fact, allowed=self._other_tasks or not self._resuming)
        self._tasks[name] = (size, sorted({*known, *digests}))

    async def _offer(self, wanted: int) -> None:
        """Offer as many open draws as are wanted, not counting those of environments without a worker."""
        if not any(source.weight > 0 for source in self._sources.values()):
            return
        if not self._adopted:
            self._adopt()
        missing = wanted - sum(draw.environment in self._sources for draw in self._open.values())
        if missing > 0:
            again, self._unoffered = self._unoffered[:missing], self._unoffered[missing:]
            offered = again + self._draw(missing - len(again))
            self._open |= {draw.id: draw for draw in offered}
            await self._here.offer_draws(offered)

    def _draw(self, n: int) -> list[Draw]:
        """Return the curriculum's next `n` draws whose groups have not been leased already."""
        found: list[Draw] = []
        while missing := n - len(found):
            with in_one_line("the curriculum failed to draw"):
                draws = self.curriculum.draw(missing)
            refuse_no_draws(draws, missing)
            for draw in draws:
                if draw.id in self._ahead:
                    self._ahead.remove(draw.id)
                    self._settle(draw, "dropped", None)  # trained or not, without the curriculum
                else:
                    found.append(draw)
        return found

    def _newest(self, number: int, group: ScoredGroup, version: int) -> int:
        """Return the newest version that its tokens can have: the checkpoint's, if it may have been sampled before this session."""
        before = number < self._here.next_id or group.draw.id in self._suspects
        return self._base if before and self._base is not None else version

    def _of_this_timeline(self, group: ScoredGroup, newest: int, version: int) -> ScoredGroup:
        """Set versions of another timeline to unknown. Versions that never existed are left for the loop to refuse."""
        before = self._here.newest_before
        if before is not None and sampled_after(group, max(before, version)):
            return group
        return without_versions_after(group, newest)

    async def _run_again(self, lost: Sequence[tuple[int, Draw]]) -> None:
        await self._here.drop([number for number, _ in lost], OTHER_TIMELINE)
        for _, draw in lost:
            self._dropped(OTHER_TIMELINE, None)
            self._suspects.discard(draw.id)
            if (known := self._open.pop(draw.id, None)) is not None:
                self._unoffered.append(known)
        self._unoffered.sort(key=lambda draw: draw.id)
        if not self._warned_of_lost:
            self._warned_of_lost = True
            console.say(
                "groups that were sampled from weights newer than this run's are waiting: another run left them, or this "
                "one before it was resumed. Their draws are run again, and counted as groups/other_timeline."
            )

    def _taken(self, number: int, group: ScoredGroup) -> ScoredGroup:
        """Return the group for the loop: with a draw that it may settle, or one below 0."""
        known = self._open.pop(group.draw.id, None)
        if known is None and (known := self._find_unoffered(group.draw.id)) is not None:
            self._unoffered.remove(known)
        if known is not None:
            return group
        if group.draw.id >= 0:
            self._ahead.add(group.draw.id)
        return replace(group, draw=replace(group.draw, id=-1 - number))

    def _find_unoffered(self, number: int) -> Draw | None:
        return next((draw for draw in self._unoffered if draw.id == number), None)

    def _adopt(self) -> None:
        """Take the draws of groups that came while this run was dead, and wait on the server, from the curriculum again."""
        self._adopted = True
        waiting = set(self._here.waiting_draws) - self._ahead
        highest = max(waiting, default=-1)
        while waiting:
            [draw] = self._draw(1)
            if draw.id in waiting:
                waiting.remove(draw.id)
                self._open[draw.id] = draw
            else:
                self._unoffered.append(draw)
            if draw.id >= highest:
                break


def _holder(directory: Path) -> str:
    """Return a name for this run that stays the same when it is resumed."""
    file = directory / "holder"
    if not file.exists():
        write_whole(file, f"{directory.resolve().name}-{secrets.token_hex(8)}")
    return file.read_text()
