"""Training: the requests of all models, carried out one at a time, models in turn.

At most `most_adapters` adapters are in the trainer. Another one makes the one that was used longest ago give way; it comes back from its
saved state and its journal. That is also how adapters come back after a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from contextlib import suppress
from shutil import rmtree
from typing import NoReturn

import orjson

from atropos_core import console
from atropos_core.errors import (
    AtroposError,
    CheckpointError,
    DataError,
    OutOfMemory,
    ProcessDied,
    RunDirectoryError,
    TrainingDiverged,
)
from atropos_core.stepwise import StepwiseTrainer
from atropos_core.storage.atomic import appearing
from atropos_tinker_api.http.fields import Fields
from atropos_tinker_api.refused import Category, Refused, error_body, said
from atropos_tinker_api.state.journal import Kind
from atropos_tinker_api.state.model import Model, json_body
from atropos_tinker_api.wire.training_request import is_forward_only
from atropos_tinker_api.work.operations import Limits, carry_out_again, forward_backward, optim_step
from atropos_tinker_api.work.saving import Saving

SAVING_SHARE = 0.05  # of the time that may go into saving states
OF_USER = (DataError, TrainingDiverged, CheckpointError, RunDirectoryError)


class Training:
    """`run` carries out what `wake` was called for."""

    def __init__(self, trainer: StepwiseTrainer, saving: Saving, limits: Limits, most_adapters: int) -> None:
        self._trainer = trainer
        self._saving = saving
        self._limits = limits
        self._most = most_adapters
        self._turns: OrderedDict[str, Model] = OrderedDict()  # models with a request that can be carried out
        self._loaded: OrderedDict[str, Model] = OrderedDict()  # adapters in the trainer, the last used one last
        self._broken: set[str] = set()  # models whose gradient since the last step is not whole
        self._work = asyncio.Event()
        self._last_save: dict[str, tuple[float, float]] = {}  # when, and how long it took

    def wake(self, model: Model) -> None:
        """A request of this model may be ready."""
        if model.is_ready:
            self._turns.setdefault(model.id, model)
            self._work.set()

    async def run(self) -> NoReturn:
        """Raises what ends the server, such as ProcessDied."""
        while True:
            while not self._turns:
                self._work.clear()
                await self._work.wait()
            id, model = self._turns.popitem(last=False)
            if model.is_ready:  # it may have been woken while it was at work, for a request that is done by now
                await self._carry_out(model)
            if model.is_ready:
                self._turns[id] = model

    async def _carry_out(self, model: Model) -> None:
        kind, body = model.body(model.next_seq)
        try:
            done, answer = await self._answer(model, kind, body)
        except (Refused, *OF_USER) as error:
            text = str(error) if isinstance(error, Refused) else said(error)
            await self._failed(model, kind, body, text, "user")
        except ProcessDied:
            raise
        except OutOfMemory as error:
            await self._failed(model, kind, body, said(error), "server")
        except AtroposError as error:
            await self._failed(model, kind, body, f"{type(error).__name__}: {said(error)}", "server")
        except OSError as error:
            await self._failed(model, kind, body, f"the disk of the server refused it: {error.strerror}.", "server")
        else:
            model.finish(done, answer)
            if kind == Kind.OPTIM_STEP:
                await self._save_if_due(model)

    async def _answer(self, model: Model, kind: Kind, body: bytes) -> tuple[Kind, bytes]:
        if kind == Kind.REFUSED:
            raise Refused(body.decode())
        await self._load(model)
        if kind == Kind.CREATE:
            await self._save(model, model.next_seq)
            source = model.record.source
            kind_of_request = {"type": "create_model"} if source is None else {"type": "load_weights", "path": source}
            return Kind.DONE_JSON, json_body({"model_id": model.id, **kind_of_request})
        if kind == Kind.FORWARD_BACKWARD:
            return Kind.DONE_PROTOBUF, await forward_backward(self._trainer, model, body, self._limits)
        if kind == Kind.OPTIM_STEP:
            if model.id in self._broken:
                raise Refused(
                    "a forward_backward since the last optim_step has failed, so the gradient is not whole: it was dropped, "
                    "and the weights are as before."
                )
            return Kind.DONE_JSON, json_body(await optim_step(self._trainer, model, body))
        if kind == Kind.LOAD_WEIGHTS:
            return Kind.DONE_JSON, json_body(await self._load_checkpoint(model, body))
        return Kind.DONE_JSON, json_body(await self._saving.save(self._trainer, model, kind, body))

    async def _failed(self, model: Model, kind: Kind, body: bytes, text: str, category: Category) -> None:
        """Record that the next request failed. A step after a failed forward_backward would use part of a gradient: it fails too."""
        if kind == Kind.FORWARD_BACKWARD and not is_forward_only(body):
            self._broken.add(model.id)
        elif kind == Kind.OPTIM_STEP:
            self._broken.discard(model.id)
            if model.id in self._loaded:
                await self._trainer.clear_gradient(model.id)
        model.finish(Kind.FAILED, error_body(text, category))

    # -- adapters in the trainer

    async def _load(self, model: Model) -> None:
        """Have the model's adapter in the trainer, as its requests so far have made it."""
        if model.id in self._loaded:
            self._loaded.move_to_end(model.id)
            return
        while len(self._loaded) >= self._most:
            id, _ = self._loaded.popitem(last=False)
            await self._trainer.drop_adapter(id)
        state, record = model.state(), model.record
        if state is not None:
            await self._trainer.restore_adapter(state[1], model.id, True)
        elif record.source is not None:
            await self._trainer.restore_adapter(self._saving.source(record.source), model.id, record.with_moments)
        else:
            await self._trainer.create_adapter(model.id, record.settings)
        since = state[0] if state is not None else 0
        try:
            await carry_out_again(self._trainer, model, since, self._limits)
        except BaseException:
            with suppress(AtroposError):
                await self._trainer.drop_adapter(model.id)
            raise
        self._loaded[model.id] = model
        self._broken.discard(model.id)
        if self._is_broken(model, since):
            self._broken.add(model.id)

    def _is_broken(self, model: Model, since: int) -> bool:
        """True if a forward_backward has failed since the last step, which is request `since` or a later one."""
        for _, kind, body, succeeded in reversed(model.carried_out_since(since)):
            if kind in (Kind.OPTIM_STEP, Kind.LOAD_WEIGHTS):
                return False
            if kind == Kind.FORWARD_BACKWARD and not succeeded and not is_forward_only(body):
                return True
        return False

    async def _load_checkpoint(self, model: Model, body: bytes) -> dict[str, str]:
        given = Fields(orjson.loads(body))
        path = given.text("path")
        await self._trainer.restore_adapter(self._saving.source(path), model.id, given.truth("optimizer"))
        self._broken.discard(model.id)
        await self._save(model, model.next_seq)  # a restart need not find the checkpoint
        return {"path": path, "model_id": model.id, "type": "load_weights"}

    # -- saved states

    async def _save_if_due(self, model: Model) -> None:
        """Save after each step, or less often, so that saving takes at most SAVING_SHARE of the time."""
        when, took_s = self._last_save.get(model.id, (0.0, 0.0))
        if time.monotonic() - when < took_s / SAVING_SHARE:
            return
        try:
            await self._save(model, model.next_seq - 1)
            model.shorten()
        except OSError as error:
            console.warn(
                f"the state of {model.id} could not be saved ({error.strerror}): a restart repeats more requests."
            )

    async def _save(self, model: Model, seq: int) -> None:
        """Save the adapter with its moments, as it is after request `seq`."""
        started = time.monotonic()
        wanted = model.state_directory(seq)
        with appearing(wanted, durable=False) as directory:
            await self._trainer.save_adapter(directory, model.id, True)
        for older in model.state_directories():
            if older != wanted:
                await asyncio.to_thread(rmtree, older, ignore_errors=True)
        self._last_save[model.id] = (time.monotonic(), time.monotonic() - started)
