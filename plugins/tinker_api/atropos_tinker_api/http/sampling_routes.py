"""Sampling sessions and samples, and the results of all promises."""

from __future__ import annotations

from atropos_core.errors import HubClosed
from atropos_tinker_api.http.call import JSON, PROTOBUF, Answer, Call, answer
from atropos_tinker_api.refused import Refused, unknown
from atropos_tinker_api.service import Service
from atropos_tinker_api.state.journal import Kind
from atropos_tinker_api.work.sample_request import sequence_ids

HOLD_S = 30.0  # how long an answer that is not ready is waited for: a client waits 45 s
MOST_SEQ = 1 << 62


class SamplingRoutes:
    def __init__(self, service: Service, hold_s: float = HOLD_S) -> None:
        self._service = service
        self._hold_s = hold_s
        self._is_ending = False

    def stop(self) -> None:
        """The server is ending."""
        self._is_ending = True

    async def create(self, call: Call) -> Answer:
        given = call.fields()
        session = self._service.sessions.open(given.text("session_id"))
        path = given.text_or_none("model_path")
        if path is not None:
            base = self._service.samplers.checkpoint(path).base_model
        else:
            base = self._service.check_base(given.text("base_model"))
        number = given.integer("sampling_session_seq_id", least=0, most=MOST_SEQ)
        sampler = self._service.samplers.create(session.id, number, base, path)
        return answer({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def show(self, call: Call) -> Answer:
        [id] = call.parts
        sampler = self._service.samplers.find(id)
        return answer({"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.path})

    async def sample(self, call: Call) -> Answer:
        given = call.fields()
        if not given.has("sampling_session_id"):
            raise Refused("sampling_session_id is missing: create a sampling session first.")
        sampler = self._service.samplers.find(given.text("sampling_session_id"))
        self._service.sessions.open(sampler.id.partition(":")[0])
        id, n = self._service.sampling.submit(
            sampler, given.integer("seq_id", least=0, most=MOST_SEQ), call.body, given
        )
        return answer({"request_id": id, "sample_sequence_ids": sequence_ids(id, n)})

    async def cancel(self, call: Call) -> Answer:
        self._service.sampling.cancel(call.fields().text("request_id"))
        return answer({})

    async def retrieve(self, call: Call) -> Answer:
        """Return a result, or 408 if it is not ready: the client asks again at once."""
        id = call.fields().text("request_id")
        owner, _, number = id.rpartition(":")
        if not number.isascii() or not number.isdigit() or len(number) > 19:
            raise unknown("request", id)
        if ":sample:" in owner:
            result = await self._service.sampling.result(id, self._hold_s)
        else:
            result = await self._service.models.find(owner).result(int(number), self._hold_s)
        if self._is_ending and result is None:
            raise HubClosed("the server is ending.", remedy="Ask again: it may be back in a moment.")
        if result is None:
            waits = {"type": "try_again", "request_id": id, "queue_state": "active", "queue_state_reason": None}
            return answer(waits, 408)
        kind, body = result
        return Answer(200, PROTOBUF if kind == Kind.DONE_PROTOBUF else JSON, body)
