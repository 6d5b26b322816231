"""Groups of old clients, there and back: what the old server's own model accepts, we accept as it does."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError, field_validator

from atropos_core.codec import decode, encode_bytes
from atropos_core.errors import DataError
from atropos_core.group_schema import LARGEST_REWARD, LOGPROB_ROUNDING, LOWEST_LOGPROB
from atropos_core.types import UNKNOWN_VERSION, ScoredGroup
from atropos_trajectory_api.legacy_groups import incoming_groups as wire
from atropos_trajectory_api.legacy_groups.incoming_groups import (
    KEYS,
    ScoredData,
    dumps,
    from_wire,
    parse,
    read,
    to_wire,
)
from atropos_trajectory_api.legacy_groups.stored_group import as_frame, as_wire, held


class Upstream(BaseModel):
    """The fields and the one validator of atroposlib 0.4.0's ScoredData: what decides in doubt."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict] | None = None  # type: ignore[type-arg]
    group_overrides: dict | None = None  # type: ignore[type-arg]
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def check(cls, value: Any) -> Any:
        for messages in value or ():
            for one in messages:
                if "role" not in one or "content" not in one:
                    raise ValueError("role and content")
        return value


def group(**fields: Any) -> dict[str, Any]:
    """Two sequences of three and two tokens, the first token of each masked."""
    return {"tokens": [[5, 6, 7], [5, 8]], "masks": [[-100, 6, 7], [-100, 8]], "scores": [1.0, -0.5]} | fields


def taken(data: Any, version: int | None = 4) -> ScoredGroup:
    return from_wire(data, environment="words", version=version)


def given_back(group: ScoredGroup) -> dict[str, Any]:
    """As a client of GET /batch reads it, after the way through the hub."""
    again = decode(encode_bytes(group))
    text = dumps(to_wire(again))
    assert text == dumps(to_wire(group))
    return orjson.loads(text)


FULL = group(
    advantages=[[0.0, 0.5, -0.5], [0.0, 2.0]],
    ref_logprobs=[[0.0, -1.5, -2.0], [0.0, -0.25]],
    messages=[[{"role": "user", "content": "?", "reward": 0.5}, {"role": "tool", "content": [1, {"a": None}]}], []],
    generation_params={"temperature": 0.7, "seed": 3},
    inference_logprobs=[[1.0, -0.1, -0.2], [1.0, -0.3]],
    overrides=[{"temperature": 0.5}, {"sft": True, "of": "mine"}],
    group_overrides={"group_size": 2},
    images=["aGVsbG8=", None],
    env_id=3,
    distill_token_ids=[[[], [6, 1], [7]], [[], [8, 2, 3]]],
    distill_logprobs=[[[], [-0.5, -1.5], [-0.1]], [[], [-1.0, -2.0, -3.0]]],
)


# -- what arrives


def test_every_field_reaches_the_records():
    made = taken(FULL)
    one, two = (episode.rollouts[0] for episode in made.episodes)
    assert (made.draw.id, made.draw.environment, made.draw.index) == (-1, "words", -1)
    assert made.rewards.tolist() == [1.0, -0.5]
    assert one.tokens.tolist() == [5, 6, 7]
    assert one.tokens.dtype == np.int32
    assert one.sampled.tolist() == one.trained.tolist() == [False, True, True]
    assert one.logprobs is not None
    assert one.logprobs.tolist() == [0, np.float32(-0.1), np.float32(-0.2)], "the 1.0 of a masked token ends here"
    assert one.advantages is not None
    assert one.advantages.tolist() == [0, 0.5, -0.5]
    assert two.ref_logprobs is not None
    assert two.ref_logprobs.tolist() == [0, -0.25]
    assert (one.temperature, two.temperature) == (0.5, 0.7)
    assert (one.sft, two.sft) == (False, True)
    assert one.policy_version.tolist() == [4, 4, 4]
    assert two.teacher is not None
    assert two.teacher.offsets.tolist() == [0, 0, 3]
    assert two.teacher.token_ids.tolist() == [8, 2, 3]
    assert made.episodes[0].messages[0]["reward"] == 0.5
    assert made.oldest_version == 4
    assert taken(FULL, None).oldest_version is None
    assert taken(FULL, None).episodes[0].rollouts[0].policy_version.tolist() == [UNKNOWN_VERSION] * 3


def test_without_logprobs_there_are_none_and_the_version_may_be_unknown():
    made = taken(group())
    assert all(episode.rollouts[0].logprobs is None for episode in made.episodes)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1.0, 1.0]),
        ({"group_overrides": {"temperature": 0.3}}, [0.3, 0.3]),
        ({"group_overrides": {"temperature": 0.3}, "generation_params": {"temperature": 0.6}}, [0.6, 0.6]),
        ({"generation_params": {"temperature": 0.6}, "overrides": [{}, {"temperature": "0.9"}]}, [0.6, 0.9]),
        ({"generation_params": {"temperature": None}, "overrides": [{"temperature": 2}]}, [2.0, 1.0]),
    ],
    ids=str,
)
def test_the_temperature_is_looked_for_where_the_old_trainer_looked(fields, expected):
    made = taken(group(**fields))
    assert [episode.rollouts[0].temperature for episode in made.episodes] == expected


def test_set_advantage_to_zero_is_zeros_for_that_sequence_alone_and_comes_back_as_it_was_sent():
    sent = group(overrides=[{}, {"set_advantage_to_zero": True}])
    one, two = (episode.rollouts[0] for episode in taken(sent).episodes)
    assert one.advantages is None
    assert two.advantages is not None
    assert two.advantages.tolist() == [0, 0]
    assert given_back(taken(sent))["advantages"] is None
    sent = group(overrides=[{}, {"set_advantage_to_zero": True}], advantages=[[0, 1, 2], [0, 3]])
    one, two = (episode.rollouts[0] for episode in taken(sent).episodes)
    assert one.advantages.tolist() == [0, 1, 2]
    assert two.advantages.tolist() == [0, 0]
    assert given_back(taken(sent))["advantages"] == [[0, 1, 2], [0, 3]]


@pytest.mark.parametrize("odd", [[[0, 1], [0, 3]], [[0.5, 1, 2, 3], [0, 3]], [[0, 1, 2]], [[], [1, 2]]], ids=str)
def test_advantages_of_another_length_are_given_back_and_not_trained_aloud(odd, capsys, monkeypatch):
    """As atroposlib's published tests send them, whose client drops a group that is refused."""
    monkeypatch.setattr(wire, "_WARNED", set())
    for _ in range(2):
        made = taken(group(advantages=odd))
        assert [episode.rollouts[0].advantages for episode in made.episodes] == [None, None]
        assert given_back(made)["advantages"] == odd
    assert (
        capsys.readouterr().err.count(
            "environment 'words' sends advantages that are not one for each token: they are ignored"
        )
        == 1
    )


@pytest.mark.parametrize("bad", [[[0, float("nan")], [0, 3]], [["x"], [1]], [1.0], 3])
def test_advantages_that_are_no_numbers_by_sequence_are_refused_whatever_their_length(bad):
    with pytest.raises(DataError, match="advantages"):
        taken(group(advantages=bad))


def test_groups_of_one_prompt_are_of_one_task():
    other = group(tokens=[[5, 9, 9], [5, 8]], masks=[[-100, 9, 9], [-100, 8]])
    elsewhere = group(tokens=[[4, 9, 9], [4, 8]], masks=[[-100, 9, 9], [-100, 8]])
    assert taken(group()).task.id == taken(other).task.id
    assert taken(group()).task.id != taken(elsewhere).task.id


# -- and goes back


@pytest.mark.parametrize(
    "sent",
    [
        FULL,
        group(),
        group(masks=[[0, 1, 1], [0, 1]]),
        group(inference_logprobs=[[0.0, -0.5, -0.25], [0.0, -2.0]]),
        group(inference_logprobs=[[-3.0, -0.5, -0.25], [-4.0, -2.0]]),
        group(masks=[[5, 6, 7], [5, 8]], inference_logprobs=[[-1.0, -1.0, -1.0], [-1.0, -1.0]]),
        group(messages=[[], []]),
        group(messages=[[{"role": "user", "content": "one list for two sequences"}]]),
        group(messages=[]),
        group(overrides=[], advantages=[], inference_logprobs=[], distill_token_ids=[], distill_logprobs=[]),
        group(scores=[0.1, 1 / 3]),
        group(images={"any": ["thing"]}),
        group(tokens=[[2**31 - 1, 0, 1], [0, 0]], masks=[[-100] * 3, [-100] * 2]),
    ],
    ids=lambda sent: ",".join(sorted(set(sent) - {"tokens", "scores"})),
)
def test_what_was_sent_comes_back_in_exactly_the_fourteen_keys(sent):
    back = given_back(taken(sent))
    assert list(back) == list(KEYS)
    assert back == dict.fromkeys(KEYS) | sent


numbers = st.one_of(
    st.integers(-3, 9), st.sampled_from([5.0, 2.5, "7", "x", True, None, 2**31, -(2**31) - 1, 2**63, 1e39, "0.25"]),
    st.floats(-8, 2, width=16),
)  # fmt: skip
plain = st.integers(0, 9)


def rows(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.just([]), st.just("no"), st.lists(entries, max_size=3))


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly right groups, with one or two values of another kind or length here and there."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    strange = draw(st.sampled_from([None, None, *KEYS]))

    def one_each(entry: st.SearchStrategy[Any], name: str) -> Any:
        if strange == name and draw(st.booleans()):
            return draw(rows(rows(numbers)))
        cell = numbers if strange == name else entry
        return [[draw(cell) for _ in range(length)] for length in lengths]

    tokens = one_each(plain, "tokens")
    body: dict[str, Any] = {"tokens": tokens}
    body["masks"] = (
        one_each(plain, "masks")
        if strange in ("masks", "tokens")
        else [[draw(st.sampled_from([-100, entry])) for entry in row] for row in tokens]
    )
    right = st.lists(st.floats(-8, 8) | st.integers(-2, 2), min_size=len(lengths), max_size=len(lengths))
    body["scores"] = draw(rows(numbers) if strange == "scores" else right)
    for name in ("advantages", "ref_logprobs", "inference_logprobs"):
        if draw(st.booleans()):
            body[name] = one_each(st.floats(-8, 1, width=16) | st.integers(-2, 2), name)
    if draw(st.booleans()):
        shape = [[draw(st.integers(0, 2)) for _ in range(length)] for length in lengths]
        for name, cell in (("distill_token_ids", plain), ("distill_logprobs", st.floats(-4, 0, width=16))):
            cells = numbers if strange == name else cell
            body[name] = [[[draw(cells) for _ in range(k)] for k in row] for row in shape]
    message = st.fixed_dictionaries({"role": st.text(max_size=3), "content": st.text(max_size=3) | st.none()})
    opaque = st.dictionaries(st.sampled_from("ab"), st.integers() | st.text(max_size=2) | st.lists(st.booleans()))
    wrong = st.sampled_from(["no", 3, [[{"role": "user"}]], [["role content"]], [1], {"temperature": "hot"}])
    for name, right in {
        "messages": st.lists(st.lists(message, max_size=2), max_size=3),
        "generation_params": opaque,
        "overrides": st.lists(opaque, max_size=len(lengths)),
        "group_overrides": opaque,
        "images": opaque,
        "env_id": st.integers(-2, 4) | st.sampled_from(["3", 2.0, True, 2**70]),
    }.items():
        if draw(st.booleans()):
            body[name] = draw(wrong if strange == name else st.none() | right)
    return body


def unusable(body: Upstream) -> bool:
    """What we refuse although the old server took it: lengths that disagree, numbers that do not fit, logprobs of trained
    tokens that are none."""
    lengths = [len(row) for row in body.tokens]
    columns = [body.ref_logprobs, body.inference_logprobs]
    teacher = (body.distill_token_ids, body.distill_logprobs)
    ids = [n for row in body.tokens for n in row] + [n for row in body.distill_token_ids or () for k in row for n in k]
    floats = [n for column in columns for row in column or () for n in row] + body.scores
    given = body.advantages or []
    ignored = [len(row) for row in given] != lengths  # advantages of another length
    floats += [n for row in body.distill_logprobs or () for k in row for n in k]
    temperatures = [body.generation_params, body.group_overrides, *(body.overrides or ())]
    return (
        not lengths
        or not all(lengths)
        or len(body.scores) != len(lengths)
        or [len(row) for row in body.masks] != lengths
        or any(column and [len(row) for row in column] != lengths for column in (*columns, *teacher))
        or any(not 0 <= number < 2**31 for number in ids)
        or any(not -(2**31) <= number < 2**31 for row in body.masks for number in row)
        or any(not math.isfinite(number) or abs(number) > 3.4e38 for number in floats)
        or bool(teacher[0]) != bool(teacher[1])
        or (
            bool(teacher[0])
            and [[len(k) for k in row] for row in teacher[0]] != [[len(k) for k in row] for row in teacher[1]]
        )  # type: ignore[union-attr]
        or len(body.overrides or ()) > len(lengths)
        or any((one or {}).get("temperature") == "hot" for one in temperatures)
        or any(not LOWEST_LOGPROB <= logprob <= LOGPROB_ROUNDING for logprob in trained_logprobs(body))
        or not all(math.isfinite(n) for row in given for n in row)
        or any(abs(n) > LARGEST_REWARD for row in [body.scores, *(() if ignored else given)] for n in row)
    )


def trained_logprobs(body: Upstream) -> Iterator[float]:
    for column in (body.ref_logprobs, body.inference_logprobs, body.distill_logprobs):
        for tokens, masks, row in zip(body.tokens, body.masks, column or (), strict=False):
            for token, mask, found in zip(tokens, masks, row, strict=True):
                if token == mask:
                    yield from found if isinstance(found, list) else [found]


@given(bodies())
@example({"tokens": [[0], [0, 1]], "masks": [[-100], [0, 1]], "scores": [0.0, 1.0], "advantages": [[]]})
@example({"tokens": [[0, 0]], "masks": [[-100, -100]], "scores": [0.0], "advantages": [[2**31]]})  # ignored
@settings(max_examples=600)
def test_what_the_old_server_takes_comes_back_as_from_it_and_the_rest_is_refused(body):
    try:
        wanted = Upstream.model_validate(body)
    except (ValidationError, TypeError):  # a TypeError was a 500 of the old server
        with pytest.raises(DataError):
            taken(body)
        return
    if unusable(wanted):
        with pytest.raises(DataError):
            taken(body)
        return
    kept = read(body, "words").frame()
    for back in (to_wire(decode(encode_bytes(taken(body)))), as_wire(kept), to_wire(decode(as_frame(kept)))):
        assert list(back) == list(KEYS)
        for key, value in wanted.model_dump().items():
            assert close(back[key], value), (key, back[key], value)


def test_what_the_hub_keeps_of_a_group_is_all_of_it():
    kept = read(FULL, "words").frame()
    assert encode_bytes(held(kept).group(4)) == encode_bytes(taken(FULL, 4))
    assert as_frame(kept) == encode_bytes(taken(FULL, None))
    native = encode_bytes(taken(FULL, None))
    assert as_frame(native) is native
    marked = group(generation_params={"~a": ["<i4", [3], 0]}, images={"~r": "Draw", "~f": []})
    assert as_wire(read(marked, "words").frame())["generation_params"] == marked["generation_params"]


def close(one: Any, other: Any) -> bool:
    """Equal, but for the 32 bits of a float."""
    if isinstance(one, (list, tuple, np.ndarray)):
        return isinstance(other, list) and len(one) == len(other) and all(map(close, one, other))
    if isinstance(other, float):
        return bool(np.float32(one) == np.float32(other))
    return type(other) is type(one if not isinstance(one, np.generic) else one.item()) and bool(one == other)


def test_the_models_fields_and_defaults_are_the_old_ones():
    ours, theirs = ScoredData.model_fields, Upstream.model_fields
    assert list(ours) == list(theirs)
    assert {name: field.is_required() for name, field in ours.items()} == {
        name: field.is_required() for name, field in theirs.items()
    }
    assert set(KEYS) == set(theirs)


# -- what is refused, and how it is named


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        (group(tokens=[[5, 6, -7], [5, 8]]), r"tokens\[0\]\[2\]: -7 is below 0"),
        (group(tokens=[[5, 6, 7], [5, 2**31]]), r"tokens\[1\]\[1\]: 2147483648 does not fit 32 bits"),
        (group(tokens=[[5, 6, 7], [5, 1.5]]), r"tokens\[1\]\[1\]: Input should be a valid integer"),
        (group(tokens=[]), "tokens: a sequence needs at least one token"),
        (group(tokens=[[5, 6, 7], []]), r"tokens\[1\]: a sequence needs"),
        (group(masks=[[-100, 6, 7]]), "masks: there are 1, for 2 sequences"),
        (group(masks=[[-100, 6, 7], [-100]]), r"masks\[1\]: 1 entries, for 2 tokens"),
        (group(scores=[1.0]), "scores: there are 1, for 2"),
        (group(scores=[1.0, math.nan]), r"scores\[1\] is nan: must be a number from"),
        (group(scores=[1.0, 1e39]), r"scores\[1\] is 1e\+39: must be a number from -1e\+09 to 1e\+09"),
        (group(inference_logprobs=[[1.0, -1.0, -1.0], [1.0, -math.inf]]), r"inference_logprobs\[1\]\[1\] is -inf: a logprob is"),
        (group(advantages=[[0, 0, -4e38], [0, 2**40]], env_id=2**70), r"advantages\[0\]\[2\] is -inf: must be a number"),
        (group(inference_logprobs=[[1.0, -1.0], [1.0, -1.0]]), r"inference_logprobs\[0\]: 2 entries, for 3"),
        (group(advantages=[1, 2]), r"advantages\[0\]: Input should be a valid list"),
        (group(distill_token_ids=[[[], [], []], [[], []]]), "distill_logprobs is missing"),
        (group(distill_token_ids=[[[], [1], []], [[], []]], distill_logprobs=[[[], [], []], [[], []]]),
         r"distill_logprobs\[0\]\[1\]: as many as"),
        (group(distill_token_ids=[[[], [], []], [[], [-1]]], distill_logprobs=[[[], [], []], [[], [-1.0]]]),
         r"distill_token_ids\[1\]\[1\]: -1"),
        (group(messages=[[{"role": "user"}], []]), "messages: .*'role' and 'content'"),
        (group(messages=[[7], []]), r"messages\[0\]\[0\]"),
        (group(overrides=[{}, {}, {}]), "overrides: there are 3, for 2"),
        (group(overrides=[{"temperature": "hot"}]), r"overrides\[0\]\['temperature'\] is 'hot': must be 0"),
        (group(generation_params={"temperature": -1}), r"generation_params\['temperature'\] is -1: must be 0"),
        (group(env_id="x"), "env_id: "),
        ({"tokens": [[1]]}, "masks: Field required"),
        (7, "the group: Input should be"),
        ([], "the group: Input should be"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused_is_named_with_its_place(sent, named):
    with pytest.raises(DataError, match=named):
        taken(sent)


def test_data_of_the_clients_own_may_not_nest_without_end():
    deep: Any = 1
    for _ in range(wire.MAX_DEPTH + 2):
        deep = [deep]
    with pytest.raises(DataError, match="images: nested more than 64 deep"):
        taken(group(images=deep))
    assert given_back(taken(group(images=deep[0][0][0])))["images"] == deep[0][0][0]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nul", b"7", b'"text"', b"null", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 18446744073709551616}',
        b"[" + b"9" * 5000 + b"]", b"[" * 5000 + b"]" * 5000, b'{"a": "\xff"}', b'{"a": "\\ud800"}',
        b'{"a": -9223372036854775809}', b'{"a": 1} x', b'[{"b": [0, {"c": 100000000000000000000}]}]',
    ],
    ids=lambda body: str(body[:24]),
)  # fmt: skip
def test_a_body_that_is_not_json_is_refused(body):
    with pytest.raises(DataError, match="the body"):
        parse(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 18446744073709551615}', b'{"a": -9223372036854775808}', b'[0.00012345678901234567]', b"[]",
        b'{"a": "99999999999999999999999"}', b"[1e300, -0.0]", b'{"b": [1e19, 9223372036854775808]}',
    ],
    ids=str,
)  # fmt: skip
def test_a_body_within_bounds_is_read_as_json_reads_it(body):
    assert parse(body) == json.loads(body)


def test_numbers_of_any_size_can_be_answered():
    assert dumps({"uuid": 2**127}) == b'{"uuid":%d}' % 2**127
    assert json.loads(dumps({"uuid": 2**127, "a": np.arange(3), "b": np.float32(0.5)})) == {
        "uuid": 2**127, "a": [0, 1, 2], "b": 0.5,
    }  # fmt: skip


# -- what it costs


def test_a_group_of_eight_thousand_tokens_takes_less_than_a_tenth_of_a_megabyte():
    random = np.random.default_rng(0)
    tokens = random.integers(0, 150_000, (8, 1024)).tolist()
    logprobs = [[1.0] * 200 + row for row in (-random.exponential(1, (8, 824))).tolist()]
    sent = {
        "tokens": tokens, "masks": [[-100] * 200 + row[200:] for row in tokens], "scores": [0.0] * 8,
        "inference_logprobs": logprobs, "env_id": 0,
    }  # fmt: skip
    assert len(encode_bytes(taken(sent))) < 80_000
