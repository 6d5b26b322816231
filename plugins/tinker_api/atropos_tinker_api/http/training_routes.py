"""Models, and the requests that train and save them. Each is answered with a promise: an id that `retrieve_future` takes."""

from __future__ import annotations

import secrets
import time

from atropos_core.errors import DataError
from atropos_core.stepwise import AdapterSettings
from atropos_tinker_api.http.call import Answer, Call, answer
from atropos_tinker_api.http.fields import Fields
from atropos_tinker_api.refused import Refused
from atropos_tinker_api.service import ALPHA, Service
from atropos_tinker_api.state.checkpoints import TRAINING
from atropos_tinker_api.state.journal import Kind
from atropos_tinker_api.state.model import Model, ModelRecord
from atropos_tinker_api.wire.training_request import addressed
from atropos_tinker_api.work.saving import settings_of

MOST_RANK = 4096
MOST_MODELS = 1_000_000_000  # of one session, by their numbers
ADAMW = "adamw"


class TrainingRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create_model(self, call: Call) -> Answer:
        given = call.fields()
        base = self._service.check_base(given.text("base_model"))
        _check_optimizer(given)
        if not given.has("lora_config"):
            raise DataError("lora_config is missing, and this server trains only LoRA adapters.")
        lora = given.fields("lora_config")
        seed = lora.integer_or_none("seed")
        settings = AdapterSettings(
            rank=lora.integer("rank", 32, least=1, most=MOST_RANK),
            alpha=ALPHA,
            seed=secrets.randbits(31) if seed is None else seed % (1 << 63),
            attention=lora.truth("train_attn", True),
            mlp=lora.truth("train_mlp", True),
            head=lora.truth("train_unembed", True),
        )
        if not (settings.attention or settings.mlp or settings.head):
            raise DataError("one of train_attn, train_mlp and train_unembed must be true.")
        return self._created(given, base, settings)

    async def load_weights(self, call: Call) -> Answer:
        given = call.fields()
        if not given.has("session_id"):  # into a model that exists
            model = self._service.models.find(given.text("model_id"))
            return self._accept(model, Kind.LOAD_WEIGHTS, given.integer("seq_id"), call.body)
        checkpoint = self._service.checkpoints.find(given.text("path"))
        if checkpoint.folder != TRAINING:
            raise Refused(f"{checkpoint.path} has weights for sampling: name a checkpoint that save_state wrote.")
        base = self._service.check_base(given.text("base_model", checkpoint.base_model))
        _check_optimizer(given)
        return self._created(
            given, base, settings_of(checkpoint), source=checkpoint.path, with_moments=given.truth("optimizer")
        )

    def _created(
        self,
        given: Fields,
        base: str,
        settings: AdapterSettings,
        *,
        source: str | None = None,
        with_moments: bool = False,
    ) -> Answer:
        session = self._service.sessions.open(given.text("session_id"))
        number = given.integer("model_seq_id", least=0, most=MOST_MODELS - 1)
        record = ModelRecord(
            id=f"{session.id}:train:{number}",  # clients know this form
            session_id=session.id,
            base_model=base,
            settings=settings,
            created=time.time(),
            user_metadata=given.metadata("user_metadata"),
            source=source,
            with_moments=with_moments,
        )
        model = self._service.models.create(record)
        self._service.training.wake(model)
        return _promise(model, 0)

    async def info(self, call: Call) -> Answer:
        record = self._service.models.find(call.fields().text("model_id")).record
        model = {
            "arch": self._service.architecture,
            "model_name": record.base_model,
            "tokenizer_id": str(self._service.model),
        }
        return answer(
            {
                "type": "get_info",
                "model_id": record.id,
                "model_data": model,
                "model_name": record.base_model,
                "is_lora": True,
                "lora_rank": record.settings.rank,
                "optimizer_config": {"type": ADAMW},
            }
        )

    async def forward_backward(self, call: Call) -> Answer:
        id, seq = addressed(call.body)
        return self._accept(self._service.models.find(id), Kind.FORWARD_BACKWARD, seq, call.body)

    async def optim_step(self, call: Call) -> Answer:
        return self._in_order(call, Kind.OPTIM_STEP)

    async def save_weights(self, call: Call) -> Answer:
        return self._in_order(call, Kind.SAVE_WEIGHTS)

    async def save_for_sampler(self, call: Call) -> Answer:
        return self._in_order(call, Kind.SAVE_FOR_SAMPLER)

    async def save_external(self, call: Call) -> Answer:
        """Refuse it in its turn: its sequence id is taken."""
        given = call.fields()
        model = self._service.models.find(given.text("model_id"))
        text = (
            "save_weights_external is not offered by this server: what save_state writes is a peft directory already."
        )
        return self._accept(model, Kind.REFUSED, given.integer("seq_id"), text.encode())

    def _in_order(self, call: Call, kind: Kind) -> Answer:
        given = call.fields()
        return self._accept(self._service.models.find(given.text("model_id")), kind, given.integer("seq_id"), call.body)

    def _accept(self, model: Model, kind: Kind, seq: int, body: bytes) -> Answer:
        self._service.sessions.open(model.record.session_id)
        self._service.models.accept(model, kind, seq, body)
        model.last_request = time.time()
        self._service.training.wake(model)
        return _promise(model, seq)


def _promise(model: Model, seq: int) -> Answer:
    return answer({"request_id": f"{model.id}:{seq}", "model_id": model.id})


def _check_optimizer(given: Fields) -> None:
    """Raises DataError for another optimizer than AdamW."""
    if given.has("optimizer_config"):
        kind = given.fields("optimizer_config").text("type", ADAMW)
        if kind != ADAMW:
            raise DataError(f"the optimizer {kind[:50]!r} is not one of this server's.", remedy="Use AdamW.")
