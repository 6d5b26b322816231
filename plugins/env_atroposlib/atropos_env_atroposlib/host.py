"""The environment's process: `python -m atropos_env_atroposlib.host DESCRIPTOR ROLE`. Only `AtroposlibEnvironment` starts it."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.errors import ConfigError, DataError
from atropos_core.guards.deadlines import within
from atropos_core.processes.child_main import Host, main
from atropos_core.storage.atomic import append_lines
from atropos_core.types import Completion
from atropos_env_kit.local_datasets import serve_datasets

SAMPLE_DEADLINE_S = 3600.0  # the rollout's own deadline is shorter
KEPT = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "overrides", "group_overrides")


class EnvironmentHost(Host):
    """One environment and its stream of items."""

    def __init__(self) -> None:
        super().__init__()
        self._environment: Any = None
        self._sends = False  # True if it collects nothing and sends groups when a step begins
        self._items: dict[int, Any] = {}  # of draws that have no group yet, by their task's number
        self._taking = asyncio.Lock()  # items are taken one at a time, since the stream has state

    async def build(self, wanted: dict[str, Any]) -> None:
        """`wanted`: place, config, datasets, policy_urls, model, today, tables. Raises ConfigError, PluginError."""
        from atropos_env_atroposlib.loading import configured, load_class
        from atropos_env_atroposlib.standins import absent, install, own_clients
        from atropos_env_atroposlib.standins.link import Link, join
        from atropos_env_atroposlib.tokenizer import load_tokenizer

        os.environ.setdefault("WANDB_MODE", "disabled")
        install()
        absent.without_wandb()
        serve_datasets(wanted["datasets"])
        own_clients.offer_default()
        self._link = Link(load_tokenizer(wanted["model"], wanted["today"]), self._sample)
        join(self._link)
        self._tables = Path(wanted["tables"])
        cls: Any = load_class(wanted["place"])
        changes = {"tokenizer_name": wanted["model"], **wanted["config"]}
        config, servers = configured(cls, changes)
        self._made = cls, config, servers
        self._clients = own_clients.OwnClients(servers, wanted["policy_urls"])
        for call in (self.open_environment, self.collect, self.evaluate, self.load):
            self.peer.handlers[call.__name__] = call

    async def open_environment(self) -> dict[str, Any]:
        """Create the environment and load its data. Returns a description. Raises ConfigError for a missing package."""
        from atropos_env_atroposlib.loading import missing
        from atropos_env_atroposlib.standins.base import BaseEnv

        cls, config, servers = self._made
        self._sends = all(
            getattr(cls, name) is getattr(BaseEnv, name) for name in ("collect_trajectory", "collect_trajectories")
        )
        takes = inspect.signature(cls.__init__).parameters
        try:
            self._environment = cls(config, servers, **{name: False for name in ("slurm", "testing") if name in takes})
            await self._environment.setup()
        except ModuleNotFoundError as error:
            raise missing(cls.__name__, error) from error
        return {
            "name": cls.name or cls.__name__,
            "evaluates": cls.evaluate is not BaseEnv.evaluate,
            "group_size": config.group_size,
        }

    async def load(self, step: int, data: dict[str, Any] | None) -> None:
        """Load what its save_checkpoint() wrote."""
        environment = self._environment
        environment.saved_data = data
        environment.curr_step = step
        environment.status_dict = {"current_step": step, "queue_size": 0}
        if data is not None:
            environment.load_checkpoint()

    async def collect(self, number: int, index: int, n: int, step: int, tries: int) -> str:
        """Groups of the next item as JSON, with what was logged. If the draw of `index` has no group yet, its item is used again."""
        environment = self._environment
        await self._at_step(step)
        environment.config.group_size = n
        groups: list[dict[str, Any]] = []
        with _Collecting(self._link, number):
            for attempt in range(1, tries + 1):
                if attempt > 1 or index not in self._items:
                    self._items[index] = await self._next_item()
                try:
                    groups = await self._groups_of(self._items[index])
                except Exception:
                    if attempt == tries:
                        raise
                    traceback.print_exc()  # into the log; atroposlib's loop also continues with another item
                if groups:
                    break
        item = self._items.pop(index, None)
        for group in groups:
            await environment.add_rollouts_for_wandb(group, item)
        return _json({"groups": [_plain_group(group) for group in groups], **self._said()})

    async def _groups_of(self, item: Any) -> list[dict[str, Any]]:
        """The groups of an item: none, one or several."""
        environment = self._environment
        if self._sends:
            return await self._sent()
        found, backlog = _pair(await environment.collect_trajectories(item))
        environment.backlog.extend(backlog)
        if isinstance(found, list) and found and not any(one is None or isinstance(one, Mapping) for one in found):
            found = await environment.score(
                found
            )  # an older atroposlib did so for trajectories that are not a group yet
        found, backlog = _pair(await environment.postprocess_histories(found))
        environment.backlog.extend(backlog)
        sent, environment.sent = environment.sent, []
        return [one for one in (*(found if isinstance(found, list) else [found]), *sent) if _has_tokens(one)]

    async def _sent(self) -> list[dict[str, Any]]:
        """The groups that the file sends when a step begins: single sequences form one group."""
        environment = self._environment
        async with self._taking:
            environment.curr_step = environment.status_dict["current_step"] - 1
            await environment.env_step_checks()
            groups, environment.sent = environment.sent, []
        groups = [one for one in groups if _has_tokens(one)]
        return [_joined(groups)] if groups and all(len(one["tokens"]) == 1 for one in groups) else groups

    async def evaluate(self, number: int, step: int) -> str:
        """Run its evaluate() and return what it logged, as JSON."""
        environment = self._environment
        await self._at_step(step)
        with _Collecting(self._link, number):
            await environment.evaluate()
            while environment.eval_workers:
                await asyncio.gather(*environment.eval_workers)
        await environment.wandb_log({})
        return _json(self._said())

    async def close(self) -> None:
        for name in ("cleanup", "close"):
            if self._environment is not None:
                made = getattr(self._environment, name)()
                if asyncio.iscoroutine(made):
                    await within(made, 5.0, f"{name}()")
        self.ended.set()

    async def _next_item(self) -> Any:
        """The next item; None if the file draws its own."""
        if self._sends:
            return None
        async with self._taking:
            if self._environment.backlog:
                return self._environment.backlog.pop(0)
            item = await self._environment.get_next_item()
        if item is None:
            raise DataError("get_next_item() returned None: the environment has no more items")
        return item

    async def _at_step(self, step: int) -> None:
        """Do what atroposlib's loop does when the trainer has reached another step."""
        environment = self._environment
        if step != environment.curr_step:
            environment.status_dict = {"current_step": step, "queue_size": 0}
            if self._sends:  # env_step_checks() then runs when a group is drawn
                environment.curr_step = step
            else:
                await environment.env_step_checks()

    def _said(self) -> dict[str, Any]:
        """Numbers for the run's metrics, and the position in the stream. Tables go to a file."""
        environment = self._environment
        environment.save_checkpoint(environment.curr_step)
        logged, environment.logged = environment.logged, {}
        numbers = {name: value for name, one in logged.items() if (value := _number(one)) is not None}
        tables = {name: one for name, one in logged.items() if hasattr(one, "columns") and hasattr(one, "data")}
        if tables:
            append_lines(
                self._tables,
                (
                    _json({"step": environment.curr_step, "table": name, "columns": one.columns, "rows": one.data})
                    for name, one in tables.items()
                ),
            )
        return {"metrics": numbers, "state": environment.saved_data, "clients": sorted(self._clients.answered)}

    async def _sample(
        self, number: int, prompt: Sequence[int], n: int, settings: Mapping[str, Any], stops: Sequence[str]
    ) -> list[Completion]:
        ids = np.asarray(prompt, np.int32)
        found: list[Completion] = await self.peer.call(
            "sample", number, ids, n, dict(settings), list(stops), deadline_s=SAMPLE_DEADLINE_S
        )
        return found


class _Collecting:
    """A context in which everything that is sampled belongs to this number."""

    def __init__(self, link: Any, number: int) -> None:
        from atropos_env_atroposlib.standins.link import Collecting

        self._link, self._made = link, Collecting(number)

    def __enter__(self) -> None:
        from atropos_env_atroposlib.standins.link import COLLECTING

        self._link.running[self._made.number] = self._made
        self._token = COLLECTING.set(self._made)

    def __exit__(self, *error: object) -> None:
        from atropos_env_atroposlib.standins.link import COLLECTING

        del self._link.running[self._made.number]
        COLLECTING.reset(self._token)


def _pair(given: Any) -> tuple[Any, list[Any]]:
    """A group and its backlog, which may be missing. (A list of groups is not a pair.)"""
    if isinstance(given, tuple) and len(given) == 2:
        return given[0], list(given[1] or ())
    return given, []


def _has_tokens(group: Any) -> bool:
    if group is None:
        return False
    if not isinstance(group, Mapping):
        raise ConfigError(f"collect_trajectories() gave {group!r:.80}, but a group must be a dict")
    return bool(group.get("tokens"))


def _joined(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join groups of one sequence each. What applies to a whole group is taken from the first."""
    every = {name for one in groups for name in one}
    lists = {
        name: [value for one in groups for value in one[name]]
        for name in every
        if all(isinstance(one.get(name), list) for one in groups)
    }
    return {**groups[0], **lists}


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the run reads. Raises DataError for a group with images, which cannot be trained."""
    if any(one is not None and one != [] for one in group.get("images") or ()):
        raise DataError("this environment's groups have images, and a policy here samples and trains only text.")
    return {name: group[name] for name in KEPT if group.get(name) is not None}


def _number(value: Any) -> float | None:
    try:
        made = float(value)
    except (TypeError, ValueError):
        return None
    return made if np.isfinite(made) else None


def _json(value: Any) -> str:
    def plain(one: Any) -> Any:
        return one.tolist() if hasattr(one, "tolist") else list(one) if isinstance(one, (set, frozenset)) else str(one)

    return json.dumps(value, default=plain)


if __name__ == "__main__":
    main(EnvironmentHost)
