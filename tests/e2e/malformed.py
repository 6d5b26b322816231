"""Requests that no client of ours would send: seeded, so that one that did harm can be sent again."""

from __future__ import annotations

import copy
import gzip
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from atropos_core.codec import PREFIX_BYTES, encode_bytes
from atropos_core.types import Draw, Sampling
from atropos_trajectory_client.client import CONTENT_TYPE
from tests.native_payloads import native_group
from tests.old_payloads import environment, old_group, trainer
from tests.raw_http import request

GROUP, LENGTH = 4, 16
_PREFIX = struct.Struct("<4sIQ")


class Sent(NamedTuple):
    what: str  # how it was made
    path: str
    data: bytes  # the whole request
    refused: bool  # no answer but a refusal will do


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


MONSTERS: tuple[Any, ...] = (
    None, True, False, "", "x" * 5000, "\ud800", "\x00", "-100", "NaN", -1, 0, 1, 1 << 31, -(1 << 31) - 1, 1 << 53, 1 << 63,
    -(1 << 63) - 1, 1 << 64, 10**400, 0.5, -0.0, 1e39, 1e308, float("nan"), float("inf"), -float("inf"), [], {}, [[]], [[[]]],
    nested(60), nested(400), [None], [float("nan")], [10**30], {"": {}}, {"~r": "Draw", "~f": []}, {"~a": ["<i4", [1 << 40], 0]},
    {"~c": ["<i4", [1 << 27], 1]}, {"~c": ["<f8", [-1, -1], 1]}, {"~b": [1 << 40, 0]}, {"~b": [-1, -1]}, {"~p": [[8], 1 << 40]},
    {"~a": ["|O", [1], 0]}, {"~t": None}, {"~d": 3}, {"~x": 0}, [1, [2, [3]]], "ÿ" * 300, ["a", 1, None],
)  # fmt: skip


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy with one to three values that are gone, cut short, doubled, or something else altogether."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        holder: Any = [value]
        at: Any = 0
        while isinstance(holder[at], (list, dict)) and holder[at] and chance.random() < 0.8:
            holder = holder[at]
            at = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        match chance.randrange(6):
            case 0 if isinstance(holder[at], list):
                holder[at] = holder[at][: chance.randint(0, len(holder[at]))]
            case 1 if isinstance(holder[at], list):
                holder[at] = holder[at] + holder[at][-2:]
            case 2 if isinstance(holder, dict):
                del holder[at]
            case _:
                holder[at] = copy.deepcopy(chance.choice(MONSTERS))
        if isinstance(holder, list) and len(holder) == 1 and at == 0:
            value = holder[0]
    return value


def flipped(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def mutated_frame(frame: bytes, chance: random.Random) -> bytes:
    """A whole frame whose header says something else."""
    _, header_bytes, body_bytes = _PREFIX.unpack_from(frame)
    header = json.loads(frame[PREFIX_BYTES : PREFIX_BYTES + header_bytes])
    made = json.dumps(mutated(header, chance)).encode()
    return _PREFIX.pack(b"ATR1", len(made), body_bytes) + made + frame[PREFIX_BYTES + header_bytes :]


# -- what would be right


def old_bodies(env_id: int) -> dict[str, Any]:
    group = old_group(GROUP, LENGTH, 1, env_id) | {
        "advantages": [[0.5] * LENGTH] * GROUP,
        "overrides": [{"set_advantage_to_zero": True}, *[{}] * (GROUP - 1)],
        "group_overrides": {"temperature": 0.7},
        "generation_params": {"temperature": 1.0},
        "messages": [[{"role": "user", "content": "what?"}]] * GROUP,
        "distill_token_ids": [[[1, 2]] * LENGTH] * GROUP,
        "distill_logprobs": [[[-1.0, -2.0]] * LENGTH] * GROUP,
    }
    return {
        "/scored_data": group,
        "/scored_data_list": [group, old_group(GROUP, LENGTH, 2, env_id)],
        "/register": json.loads(trainer(32)),
        "/register-env": json.loads(environment("one", GROUP)),
        "/disconnect-env": {"env_id": 10_000},
        "/status-env": {"env_id": env_id},
    }


def native_bodies(worker: str, session: int) -> dict[str, Any]:
    group = native_group(old_group(GROUP, LENGTH, 3), "one", draw=-1)
    frame = encode_bytes(group)
    draws = (Draw(5, "one", "train", 1, 2), Draw(6, "one", "test", 1 << 40, 3))
    path_of = f"/v1/sessions/{session}"
    return {
        "/v1/groups": {"groups": [{"key": "k", "worker": worker, "frame": frame}]},
        "/v1/workers": {
            "name": "w", "environment": "one", "tasks": 3, "weight": 1.0, "minimum": 0.1, "group_size": 4, "tokenizer": "",
            "vocabulary": 0, "digest": "d", "playing": [1, 2],
        },
        f"/v1/workers/{worker}/heartbeat": {"draining": False, "returned": [1, 2]},
        f"/v1/workers/{worker}/draws": {"n": 2, "playing": [3]},
        f"/v1/workers/{worker}/failed": {"group": group},
        "/v1/sessions": {
            "holder": "h", "group_size": GROUP, "min_group": 1, "sampling": Sampling(), "batch_groups": 2, "tokenizer": "",
            "vocabulary": 0, "model": "m", "max_staleness": 5, "max_token_len": 100, "version": 0, "committed": [1],
        },
        f"{path_of}/lease": {"groups": 1, "version": 0, "trained": [1, 2], "holding": [1], "seen": 0, "boot": "b"},
        f"{path_of}/give_back": {"ids": [1, 2]},
        f"{path_of}/commit": {"ids": [1, 2]},
        f"{path_of}/renew": {"trained": [1, 2]},
        f"{path_of}/draws": {"draws": draws},
        f"{path_of}/version": {"version": 1},
        "/v1/engines": {"session": session, "url": "http://127.0.0.1:1"},
    }  # fmt: skip


# -- what is wrong with it


def json_request(path: str, body: bytes, **more: str) -> bytes:
    return request(
        "GET" if path == "/status-env" else "POST", path, body, **{"content_type": "application/json", **more}
    )


def native_request(path: str, body: bytes, **more: str) -> bytes:
    return request("POST", path, body, **{"content_type": CONTENT_TYPE, **more})


def hopeless(chance: random.Random) -> tuple[str, bytes]:
    """A body that is neither JSON that any route takes nor a frame."""
    kinds: dict[str, Callable[[], bytes]] = {
        "random bytes": lambda: b"\xfe" + chance.randbytes(chance.randint(1, 2000)),
        "deep lists": lambda: b"[" * chance.choice((1000, 100_000, 1_000_000)),
        "deep lists that end": lambda: b"[" * 5000 + b"]" * 5000,
        "deep objects": lambda: b'{"tokens":' * 50_000,
        "a number of many digits": lambda: b'{"env_id": ' + b"9" * chance.choice((5000, 500_000)) + b"}",
        "bytes that are no text": lambda: b'{"env_id": "\xc3\x28\xff"}',
        "utf-16": lambda: json.dumps({"env_id": 0}).encode("utf-16"),
        "half an object": lambda: json.dumps(old_group(2, 8, 1)).encode()[: -chance.randint(1, 300)],
        "a scalar": lambda: chance.choice((b"null", b"true", b"0", b'"text"', b"NaN", b"-Infinity", b"1e999")),
        "an empty frame": lambda: _PREFIX.pack(b"ATR1", 0, 0),
        "a frame that claims more": lambda: _PREFIX.pack(b"ATR1", 0xFFFFFFFF, (1 << 64) - 1) + b"{}",
        "a deep frame": lambda: _PREFIX.pack(b"ATR1", 200_000, 0) + b"[" * 200_000,
        "another frame's magic": lambda: b"ATR9" + bytes(60),
    }
    what = chance.choice(list(kinds))
    return what, kinds[what]()


def zipped(body: bytes, chance: random.Random) -> tuple[str, bytes, bool]:
    """How, the bytes, and whether they are broken."""
    good = gzip.compress(body, 1)
    match chance.randrange(5):
        case 0:
            return "truncated gzip", good[: chance.randint(1, len(good) - 1)], True
        case 1:
            return "flipped gzip", good[:10] + flipped(good[10:], chance), False
        case 2:
            return "gzip with a tail", good + b"tail", True
        case 3:
            return "gzip of gzip", gzip.compress(good, 1), True
        case _:
            return "no gzip at all", body, True


def malformed(seed: int, old: dict[str, Any], native: dict[str, Any]) -> Iterator[Sent]:
    """Without end. `old` and `native` are right bodies by path."""
    chance = random.Random(seed)
    while True:
        is_old = chance.random() < 0.5
        path = chance.choice(list(old if is_old else native))
        if chance.random() < 0.4 and is_old:
            path = chance.choice(("/scored_data", "/scored_data_list"))
        send = json_request if is_old else native_request
        right = json.dumps(old[path]).encode() if is_old else encode_bytes(native[path])
        kind = chance.randrange(10)
        if kind == 0:
            what, body = hopeless(chance)
            yield Sent(what, path, send(path, body), True)
        elif kind == 1:
            what, body, refused = zipped(right, chance)
            yield Sent(what, path, send(path, body, content_encoding="gzip"), refused)
        elif kind == 2:
            yield Sent("flipped bytes", path, send(path, flipped(right, chance)), False)
        elif kind == 3:
            coding = chance.choice(("br", "deflate", "zstd", "gzip, gzip", "\xff"))
            yield Sent("another coding", path, send(path, right, content_encoding=coding), True)
        elif is_old:
            body = json.dumps(mutated(old[path], chance)).encode()
            yield Sent("mutated JSON", path, send(path, body), False)
        elif path == "/v1/groups" and kind < 8:
            frame = native[path]["groups"][0]["frame"]
            broken = mutated_frame(frame, chance) if chance.random() < 0.7 else flipped(frame, chance)
            body = encode_bytes({"groups": [{"key": str(chance.random()), "worker": "", "frame": broken}]})
            yield Sent("a mutated group", path, send(path, body), False)
        else:
            yield Sent("a mutated frame", path, send(path, mutated_frame(right, chance)), False)


def implying_frames(environment_name: str, length: int) -> list[bytes]:
    """Small frames whose group has sequences of `length` tokens: as records, whose arrays have one value, and as columns."""
    group = native_group(old_group(1, LENGTH, 3), environment_name)
    frame = encode_bytes(group)
    _, header_bytes, body_bytes = _PREFIX.unpack_from(frame)
    header = json.loads(frame[PREFIX_BYTES : PREFIX_BYTES + header_bytes])
    assert header["~g"].count([LENGTH]) == 1, "the lengths of its rollouts"
    header["~g"][header["~g"].index([LENGTH])] = [length]
    made = json.dumps(header).encode()
    as_columns = _PREFIX.pack(b"ATR1", len(made), body_bytes) + made + frame[PREFIX_BYTES + header_bytes :]
    rollout = group.episodes[0].rollouts[0]
    alike = {
        "tokens": np.int32(7),
        "sampled": np.True_,
        "trained": np.True_,
        "logprobs": np.float32(-1),
        "policy_version": np.int32(0),
    }
    for name, value in alike.items():
        object.__setattr__(rollout, name, np.broadcast_to(value, (length // 2,)))
    shared = replace(
        group, episodes=group.episodes * 2, rewards=np.repeat(group.rewards, 2)
    )  # one array of tokens for two
    return [encode_bytes(shared), as_columns]
