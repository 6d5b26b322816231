"""Requests of the protocol, written by hand: what the official client sends, and what it would never send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from atropos_tinker_api.wire.protobuf import content, double, integer, packed
from tests.tinker.server import TinkerServer

PROTOBUF = {"content-type": "application/x-protobuf", "accept": "application/x-protobuf"}
FLOAT32, INT64 = 1, 2
LORA = {"rank": 2, "seed": 3}


def tensor(values: Any) -> bytes:
    array = np.asarray(values)
    kind, dtype = ("<f4", FLOAT32) if array.dtype.kind == "f" else ("<i8", INT64)
    return content(1, array.astype(kind).tobytes()) + integer(3, dtype) + packed(4, array.shape)


def datum(tokens: Sequence[int], **inputs: Any) -> bytes:
    chunk = content(1, content(1, np.array(tokens, "<i4").tobytes()))
    entries = [content(2, content(1, name) + content(2, tensor(value))) for name, value in inputs.items()]
    return content(1, chunk) + b"".join(entries)


def forward_backward(
    model: str,
    seq: int,
    *data: bytes,
    loss: str = "cross_entropy",
    forward_only: bool = False,
    settings: dict[str, float] | None = None,
) -> bytes:
    body = content(1, model) + integer(2, seq) + b"".join(content(3, one) for one in data) + content(4, loss)
    for name, value in (settings or {}).items():
        body += content(7, content(1, name) + content(2, double(1, value)))
    return body + (integer(6, 1) if forward_only else b"")


PLAIN = datum([5, 6, 7], target_tokens=[6, 7, 8], weights=[1.0, 1.0, 1.0])


class Client:
    """One session with one adapter."""

    def __init__(self, server: TinkerServer, base_model: str = "", **lora: Any) -> None:
        self.server = server
        _, made = server.call("POST", "create_session", {"tags": [], "sdk_version": "test"})
        self.session: str = made["session_id"]
        body = {
            "session_id": self.session, "model_seq_id": 0, "base_model": base_model or server.model, "lora_config": LORA | lora,
        }  # fmt: skip
        status, promise = server.call("POST", "create_model", body)
        assert status == 200, promise
        self.model: str = self.result(promise["request_id"])[1]["model_id"]

    def result(self, request_id: str) -> tuple[int, Any]:
        """Return the answer to a promise, after as many polls as it takes."""
        while True:
            status, answer = self.server.call("POST", "retrieve_future", {"request_id": request_id})
            if status != 408:
                return status, answer

    def send(self, seq: int, *data: bytes, **more: Any) -> tuple[int, Any]:
        body = forward_backward(self.model, seq, *(data or (PLAIN,)), **more)
        return self.server.call("POST", "forward_backward", body, **PROTOBUF)

    def step(self, seq: int, **adam: Any) -> tuple[int, Any]:
        params = {"learning_rate": 0.01, **adam}
        return self.server.call("POST", "optim_step", {"model_id": self.model, "seq_id": seq, "adam_params": params})

    def done(self, answered: tuple[int, Any]) -> Any:
        """Return the result of a request that was accepted."""
        status, promise = answered
        assert status == 200, promise
        status, answer = self.result(promise["request_id"])
        assert status == 200, answer
        return answer

    def forward(self, seq: int) -> bytes:
        """Return the logprobs of PLAIN as the server answers them."""
        answer = self.done(self.send(seq, forward_only=True))
        assert isinstance(answer, bytes), answer
        return answer
