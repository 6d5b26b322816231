"""Requests before and next to the work: configuration, sessions, telemetry."""

from __future__ import annotations

from atropos_tinker_api.http.call import Answer, Call, answer
from atropos_tinker_api.service import Service

MOST_TAGS = 100
CONFIG = {  # flags of the official client; those that are missing have the client's defaults
    "sample_max_concurrent_requests": 256,  # each waits on its own connection
    "proto_compress_fwdbwd": False,
}


class SessionRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def config(self, call: Call) -> Answer:
        return answer(CONFIG)

    async def dynamic_config(self, call: Call) -> Answer:
        return answer({"sample_cancel_enabled": True})

    async def health(self, call: Call) -> Answer:
        return answer({"status": "ok"})

    async def telemetry(self, call: Call) -> Answer:
        """Accept it, and keep nothing."""
        return answer({"status": "accepted"})

    async def capabilities(self, call: Call) -> Answer:
        context = self._service.limits.context or None
        models = [
            {"model_name": name, "max_context_length": context, "trainable": True, "sampleable": True}
            for name in self._service.names
        ]
        return answer({"supported_models": models})

    async def create(self, call: Call) -> Answer:
        given = call.fields()
        tags = given.items("tags", ())[:MOST_TAGS]
        session = self._service.sessions.create(
            tuple(str(tag)[:200] for tag in tags), given.metadata("user_metadata"), given.text_or_none("display_name")
        )
        return answer({"type": "create_session", "session_id": session.id})

    async def heartbeat(self, call: Call) -> Answer:
        self._service.sessions.open(call.fields().text("session_id"))
        return answer({"type": "session_heartbeat"})

    async def finish(self, call: Call) -> Answer:
        [id] = call.parts
        given = call.fields()
        reason = {"reason": given.fields("reason").text("type", most=50), "detail": given.text_or_none("detail")}
        self._service.sessions.finish(id, reason)
        self._service.samplers.remove_of({id})
        return answer({})

    async def show(self, call: Call) -> Answer:
        [id] = call.parts
        session = self._service.sessions.find(id)
        return answer(
            {
                "training_run_ids": self._service.models.of_session(id),
                "sampler_ids": self._service.samplers.of_session(id),
                "user_metadata": texts(session.user_metadata),
                "display_name": session.display_name,
            }
        )

    async def list(self, call: Call) -> Answer:
        limit, offset = call.page(20)
        found = self._service.sessions.newest_first()[offset : offset + limit]
        return answer({"sessions": [one.id for one in found]})


def texts(metadata: object) -> dict[str, str] | None:
    """Return metadata as the client's lists have it: texts."""
    if not isinstance(metadata, dict):
        return None
    return {str(name): value if isinstance(value, str) else str(value) for name, value in metadata.items()}
