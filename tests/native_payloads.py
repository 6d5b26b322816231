"""Groups and calls of the native protocol as bytes, for load and for benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np

from atropos_core.codec import decode, encode_bytes
from atropos_core.types import Draw, Episode, Rollout, Sampling, ScoredGroup, Task
from atropos_trajectory_client.client import CONTENT_TYPE
from tests.raw_http import Connection, request


def native_group(old: dict[str, Any], environment: str, draw: int = -1) -> ScoredGroup:
    """The same tokens, masks, scores and logprobs as a group of the old protocol has."""
    tokens, masks = np.asarray(old["tokens"], np.int32), np.asarray(old["masks"])
    logprobs, sampled = np.asarray(old["inference_logprobs"], np.float32), masks != -100
    episodes = tuple(
        Episode(
            (
                Rollout(
                    tokens[i],
                    sampled[i],
                    sampled[i],
                    np.where(sampled[i], logprobs[i], np.float32(0)),
                    np.zeros(len(tokens[i]), np.int32),
                    1.0,
                ),
            ),
            score,
        )
        for i, score in enumerate(old["scores"])
    )
    seed = int(old["scores"][0])
    task = Task(str(seed), ())
    return ScoredGroup(
        Draw(draw, environment, "train", seed, seed), task, episodes, np.asarray(old["scores"], np.float32)
    )


def native_request(path: str, body: dict[str, Any]) -> bytes:
    return request("POST", path, encode_bytes(body), content_type=CONTENT_TYPE)


def put_request(key: str, worker: str, frame: bytes, wait_s: float = 30.0) -> bytes:
    return native_request("/v1/groups", {"groups": [{"key": key, "worker": worker, "frame": frame}], "wait_s": wait_s})


def native_call(end: Connection, path: str, body: dict[str, Any]) -> Any:
    answer = end.call(native_request(path, body))
    assert answer.status == 200, (answer.status, answer.body)
    return decode(answer.body)


def register_native(end: Connection, environment: str) -> str:
    """The id of a new worker."""
    reported = native_call(
        end, "/v1/workers", {"name": f"worker of {environment}", "environment": environment, "tasks": 1}
    )
    return str(reported["worker"])


def open_session(end: Connection, batch_groups: int, group_size: int) -> int:
    """The number of a new session."""
    body = {
        "holder": "load", "group_size": group_size, "min_group": 1, "sampling": Sampling(), "batch_groups": batch_groups,
        "max_staleness": 1 << 20, "version": 0,
    }  # fmt: skip
    return int(native_call(end, "/v1/sessions", body)["session"])
