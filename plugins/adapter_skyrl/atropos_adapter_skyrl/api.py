"""Groups from workers elsewhere over the trajectory API, for SkyRL's rows: each is offered as a draw and leased."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from atropos_adapter_skyrl.engine import refuse_more, sampling_of
from atropos_adapter_skyrl.rows import rows_of
from atropos_adapter_skyrl.source import GroupRequest, GroupResult, GroupSource, all_or_none, failed
from atropos_core.errors import ConfigError, DataError, NoSuchVersion
from atropos_core.rollouts.policy_versions import check_versions
from atropos_core.seeds import derive
from atropos_core.types import Draw, Failed, ScoredGroup
from atropos_trajectory_client.client import OTHER_TIMELINE, Api, SessionSpec, TrainerSession

POLL_S = 10.0
_Answer = tuple[int, ScoredGroup] | Failed


class ApiGroups(GroupSource):
    """One session of the API. Groups under ids that are not awaited are dropped, including those of an earlier run: SkyRL requests
    their tasks again, under new ids."""

    def __init__(
        self, api: Api, spec: SessionSpec, engines: Sequence[str], *, deadline_s: float, attempts: int
    ) -> None:
        self.dropped = 0  # groups that were not awaited
        self._api = api
        self._spec = spec
        self._engines = engines
        self._deadline_s = deadline_s
        self._attempts = attempts
        self._session: TrainerSession | None = None
        self._waiting: dict[int, tuple[Draw, asyncio.Future[_Answer]]] = {}
        self._receiving: asyncio.Task[None] | None = None
        self._newest = 0  # newest version that engines can have sampled from
        self._heard = 0.0  # time of the last arrival
        self._leased: dict[int, int] = {}  # draws fetched for training, and the hub's ids of their groups
        self._unsaved: list[int] = []  # trained, but not in a checkpoint yet
        self._commits: list[asyncio.Task[int]] = []

    async def open(self) -> None:
        self._session = await TrainerSession.open(self._api, replace(self._spec, version=self.version))
        for url in self._engines:
            await self._session.add_engine(url)

    async def set_version(self, version: int) -> None:
        await super().set_version(version)
        self._newest = max(self._newest, version)
        await self._here.set_version(version)

    async def announce(self, version: int) -> None:
        self._newest = max(self._newest, version)
        await self._here.announce(version)

    async def fetch(
        self, requests: Sequence[GroupRequest], params: Mapping[str, Any], *, step_wise: bool
    ) -> list[GroupResult]:
        refuse_more(params)
        spec, sampling = self._spec, sampling_of(params)
        if sampling != spec.sampling or any(one.n != spec.group_size for one in requests):
            raise ConfigError(
                f"over the trajectory API all groups are {spec.group_size} rollouts with {spec.sampling}, but SkyRL requests "
                f"{requests[0].n} with {sampling}.",
                remedy="Give evaluation the numbers of training (generator.eval_n_samples_per_prompt, "
                "eval_sampling_params), or set trainer.eval_interval=-1 or atropos.source=rings.",
            )
        await self._settle_commits()
        return await all_or_none([self._one(one, step_wise) for one in requests])

    async def _one(self, request: GroupRequest, step_wise: bool) -> GroupResult:
        loop, cause = asyncio.get_running_loop(), Failed("", "")
        began = loop.time()
        for attempt in range(self._attempts):
            draw = request.draw if not attempt else self._again(request.draw, attempt)
            future: asyncio.Future[_Answer] = loop.create_future()
            self._waiting[draw.id] = draw, future
            try:
                await self._here.offer_draws([draw])
                self._receive()
                answer = await self._in_time(future)
            except TimeoutError:
                cause = Failed(f"no group came from {self._api.url} within {self._deadline_s:g} s", "waiting")
                continue
            finally:
                self._waiting.pop(draw.id, None)
            if isinstance(answer, Failed):
                cause = answer
                continue
            number, group = answer
            if group.draw != draw or len(group.episodes) != request.n:
                raise DataError(f"draw {draw} got a group of {len(group.episodes)} for {group.draw}")
            try:
                check_versions(group, self._newest)
            except NoSuchVersion as error:
                await self._here.drop([number], OTHER_TIMELINE)
                cause = Failed(Exception.__str__(error), "its policy versions")
                continue
            if request.training:
                self._leased[request.draw.id] = number
            else:
                await self._here.commit([number])
            return GroupResult(rows_of(group, step_wise=step_wise), loop.time() - began, attempt)
        raise failed(request, cause, self._attempts)

    async def _in_time(self, future: asyncio.Future[_Answer]) -> _Answer:
        """Raises TimeoutError if no answer at all came in time: waiting behind others is not late."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._deadline_s
        while not (await asyncio.wait({future}, timeout=until - loop.time()))[0]:
            if (until := self._heard + self._deadline_s) <= loop.time():
                raise TimeoutError
        return future.result()

    def _again(self, draw: Draw, attempt: int) -> Draw:
        return replace(draw, id=secrets.randbits(61), seed=derive(draw.seed, attempt))

    def _receive(self) -> None:
        if self._receiving is None or self._receiving.done():
            self._receiving = asyncio.create_task(self._receive_on())

    async def _receive_on(self) -> None:
        """Lease while there are waiters. An error that ends this is raised to them."""
        try:
            while self._waiting:
                leased = await self._here.lease(1, self.version, POLL_S)
                for number, group in leased.entries:
                    if not self._answer(group.draw.id, (number, group)):
                        self.dropped += 1
                        await self._here.drop([number], OTHER_TIMELINE)
                for group in leased.failed:
                    self._answer(group.draw.id, group.failed[-1])
                for number, why in leased.dropped:
                    self._answer(number, Failed(f"its group was dropped: {why}", "the trajectory API"))
        except Exception as error:  # noqa: BLE001 - the waiters raise it
            for _, future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)

    def _answer(self, number: int, answer: _Answer) -> bool:
        self._heard = asyncio.get_running_loop().time()
        _, future = self._waiting.get(number, (None, None))
        if future is None or future.done():
            return False
        future.set_result(answer)
        return True

    def step_ended(self, saved: bool, draws: Collection[int] | None = None) -> bool:
        ended = [self._leased.pop(draw) for draw in (list(self._leased) if draws is None else draws)]
        self._here.trained(ended)
        self._unsaved += ended
        if saved and self._unsaved:
            self._commits.append(asyncio.create_task(self._here.commit(self._unsaved)))
            self._unsaved = []
        return self._here.commit_due

    async def _settle_commits(self) -> None:
        commits, self._commits = self._commits, []
        await asyncio.gather(*commits)

    async def close(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
        try:
            await self._settle_commits()
        finally:
            if self._session is not None:
                await self._session.close()
            await self._api.close()

    @property
    def _here(self) -> TrainerSession:
        assert self._session is not None, "open() comes first"
        return self._session
