"""Lists of models and checkpoints, and what is done with checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from atropos_tinker_api.http.call import Answer, Call, answer
from atropos_tinker_api.http.session_routes import texts
from atropos_tinker_api.refused import Refused
from atropos_tinker_api.service import Service
from atropos_tinker_api.state.checkpoints import SAMPLER, TRAINING, TYPES, Checkpoint
from atropos_tinker_api.state.model import Model

OWNER = "local"


class ListRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def runs(self, call: Call) -> Answer:
        limit, offset = call.page(20)
        models = self._service.models.all()
        found = [self._run(model) for model in models[offset : offset + limit]]
        return answer({"training_runs": found, "cursor": _cursor(limit, offset, len(models))})

    async def run(self, call: Call) -> Answer:
        return answer(self._run(self._service.models.find(call.parts[0])))

    async def checkpoints_of(self, call: Call) -> Answer:
        model = self._service.models.find(call.parts[0])
        return answer({"checkpoints": [_checkpoint(one) for one in self._service.checkpoints.of_model(model.id)]})

    async def checkpoints(self, call: Call) -> Answer:
        limit, offset = call.page(100)
        found = self._service.checkpoints.newest_first()
        page = [_checkpoint(one) for one in found[offset : offset + limit]]
        return answer({"checkpoints": page, "cursor": _cursor(limit, offset, len(found))})

    async def weights_info(self, call: Call) -> Answer:
        checkpoint = self._service.checkpoints.find(call.fields().text("tinker_path"))
        settings = checkpoint.settings
        return answer(
            {
                "base_model": checkpoint.base_model,
                "is_lora": True,
                "lora_rank": settings["rank"],
                "train_unembed": settings["head"],
                "train_mlp": settings["mlp"],
                "train_attn": settings["attention"],
                "optimizer_config": {"type": "adamw"},
            }
        )

    async def delete(self, call: Call) -> Answer:
        self._service.checkpoints.delete(self._named(call))
        return answer({})

    async def expire(self, call: Call) -> Answer:
        given = call.fields()
        self._service.checkpoints.expire(self._named(call), given.integer_or_none("ttl_seconds"))
        return answer({})

    async def publish(self, call: Call) -> Answer:
        raise Refused("checkpoints of a local server cannot be published.")

    async def external_urls(self, call: Call) -> Answer:
        raise Refused("a local server has no download URLs: a checkpoint is a directory on its machine, under --dir.")

    def _named(self, call: Call) -> Checkpoint:
        model, folder, name = call.parts
        return self._service.checkpoints.find(f"tinker://{model}/{folder}/{name}")

    def _run(self, model: Model) -> dict[str, Any]:
        record = model.record
        checkpoints = self._service.checkpoints.of_model(model.id)
        last = {
            folder: next((_checkpoint(one) for one in checkpoints if one.folder == folder), None) for folder in TYPES
        }
        return {
            "training_run_id": model.id,
            "base_model": record.base_model,
            "model_owner": OWNER,
            "is_lora": True,
            "lora_rank": record.settings.rank,
            "last_request_time": _time(model.last_request),
            "last_checkpoint": last[TRAINING],
            "last_sampler_checkpoint": last[SAMPLER],
            "user_metadata": texts(record.user_metadata),
        }


def _checkpoint(one: Checkpoint) -> Mapping[str, Any]:
    return {
        "checkpoint_id": f"{one.folder}/{one.name}",
        "checkpoint_type": TYPES[one.folder],
        "time": _time(one.created),
        "tinker_path": one.path,
        "size_bytes": one.size_bytes,
        "public": False,
        "user_metadata": texts(one.user_metadata),
        "expires_at": None if one.expires is None else _time(one.expires),
    }


def _cursor(limit: int, offset: int, total: int) -> Mapping[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
