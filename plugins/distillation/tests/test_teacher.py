"""Groups annotated by a real engine in a separate process, and by a server over HTTP."""

import asyncio
import json
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from atropos_core.errors import (
    AccessRefused,
    ApiError,
    DataError,
    FitError,
    ProcessSilent,
    RemoteError,
    TokenizerMismatch,
)
from atropos_core.guards.patience import Patience
from atropos_core.plugins.provider import RunContext
from atropos_core.types import UNKNOWN_VERSION, Draw, Episode, Rollout, ScoredGroup, Task, TopK
from atropos_distillation import server
from atropos_distillation.config import TeacherOptions
from atropos_distillation.plugin import build
from atropos_distillation.scoring_engine import of_own_tokens
from atropos_distillation.teacher import at_trained
from atropos_distillation.tokenizers import difference, refuse_another
from atropos_env_gsm8k.plugin import HERE

TINY, TEACHER = HERE / "tiny", HERE / "tiny_teacher"


def rollout(seed=0, length=12, prompt=4, temperature=1.0):
    generator = np.random.default_rng(seed)
    sampled = np.arange(length) >= prompt
    trained = sampled.copy()
    trained[prompt + 2] = False  # of a tool, say
    trained[-2:] = False
    return Rollout(
        generator.integers(4, 600, length).astype(np.int32), sampled, trained, np.zeros(length, np.float32),
        np.full(length, UNKNOWN_VERSION, np.int32), temperature,
    )  # fmt: skip


def group(*rollouts, environment="gsm8k"):
    episodes = tuple(Episode((one,), 1.0) for one in rollouts)
    return ScoredGroup(Draw(0, environment, "train", 0, 0), Task("t", ()), episodes, np.ones(len(episodes), np.float32))


def context(tmp_path, kind="forward", **changes):
    return RunContext(tmp_path, TINY, label="teacher.big", announced={"distillation": kind}, threads=1, **changes)


def logits_of(tokens, directory=TEACHER):
    """[T, V] by transformers: row t predicts token t; row 0 nothing."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].double()
    return torch.cat([torch.full((1, found.shape[1]), torch.nan), found[:-1]])


async def annotated(options, groups, tmp_path, kind="forward"):
    teacher = build(TeacherOptions(**options), context(tmp_path, kind))
    await teacher.open()
    try:
        return await teacher.annotate(groups), teacher.metrics()
    finally:
        await teacher.close()


# -- on an engine


async def test_every_token_that_the_loss_counts_gets_the_teachers_distribution_of_that_very_token(tmp_path):
    rollouts = [rollout(0), rollout(1, 17, 6), rollout(2, 9, 3, temperature=0.7), rollout(3, 8, 3)]  # the shortest last
    (made,), metrics = await annotated({"model": "tiny-teacher", "top_k": 5}, [group(*rollouts)], tmp_path)
    for before, episode in zip(rollouts, made.episodes, strict=True):
        (after,) = episode.rollouts
        np.testing.assert_array_equal(np.diff(after.teacher.offsets), 5 * before.trained)
        logs = (logits_of(before.tokens) / before.temperature).log_softmax(-1)
        for at in np.flatnonzero(before.trained):
            saved = slice(after.teacher.offsets[at], after.teacher.offsets[at + 1])
            best = logs[at].topk(5)
            np.testing.assert_array_equal(after.teacher.token_ids[saved], best.indices)
            np.testing.assert_allclose(after.teacher.logprobs[saved], best.values, atol=1e-5)
    trained = sum(int(one.trained.sum()) for one in rollouts)
    assert metrics["positions"] == trained and metrics["rollouts"] == 4 and 0 < metrics["coverage"] <= 1
    assert metrics["seconds"] > 0


async def test_for_reverse_distillation_it_is_the_sampled_token_alone(tmp_path):
    one = rollout(3)
    (made,), metrics = await annotated({"model": "tiny-teacher"}, [group(one)], tmp_path, "reverse")
    teacher = made.episodes[0].rollouts[0].teacher
    positions = np.flatnonzero(one.trained)
    np.testing.assert_array_equal(teacher.token_ids, one.tokens[positions])
    logs = logits_of(one.tokens).log_softmax(-1).numpy()
    np.testing.assert_allclose(teacher.logprobs, logs[positions, one.tokens[positions]], atol=1e-5)
    assert metrics["coverage"] == pytest.approx(np.exp(logs[positions, one.tokens[positions]]).mean(), rel=1e-4)


async def test_what_a_rollout_brought_stays_and_other_environments_are_left_alone(tmp_path):
    brought = TopK(np.arange(13), np.zeros(12, np.int32), np.full(12, -1.0, np.float32))
    groups = [group(replace(rollout(), teacher=brought), rollout(1)), group(rollout(2), environment="other")]
    (mine, other), _ = await annotated({"model": "tiny-teacher", "environments": ["gsm8k"]}, groups, tmp_path)
    assert mine.episodes[0].rollouts[0].teacher is brought and mine.episodes[1].rollouts[0].teacher is not None
    assert other.episodes[0].rollouts[0].teacher is None


async def test_a_model_that_is_not_there_ends_with_its_name_and_no_process(tmp_path):
    with pytest.raises(Exception, match="nowhere"):
        build(TeacherOptions(model=str(tmp_path / "nowhere")), context(tmp_path))


# -- what does not fit


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, None, r"\[teacher.big\] annotates every group, but the trainer ignores the annotations"),
        ({"top_k": 4}, "reverse", r"of the sampled token(.|\n)*Leave teacher\.big\.top_k unset, or set it to 0\."),
        ({"top_k": 0}, "forward", "gives only the logprob of the sampled token"),
    ],
)
def test_a_teacher_that_nobody_could_learn_from_is_refused(tmp_path, options, kind, message):
    with pytest.raises(FitError, match=message):
        build(TeacherOptions(model="tiny-teacher", **options), context(tmp_path, kind))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either a model, which runs here, or the url"),
        ({"model": "tiny", "url": "http://x/v1", "tokenizer": "tiny"}, "either a model, which runs here, or the url"),
        ({"url": "http://x/v1"}, "url needs tokenizer"),
        ({"url": "x:8000", "tokenizer": "tiny"}, "must begin with http://"),
        ({"url": "http://x/v1", "tokenizer": "tiny", "engine": {"use": "vllm"}}, "engine runs a model here"),
        ({"model": "tiny", "served_model": "big"}, "served_model applies to a server, but model runs here"),
    ],
)
def test_options_that_contradict_each_other_say_which(options, message):
    with pytest.raises(ValueError, match=message):
        TeacherOptions(**options)


def test_an_engine_that_is_not_there_is_reported_before_anything_starts():
    with pytest.raises(Exception, match="there is no engine named 'hff'. Did you mean 'hf'"):
        TeacherOptions(model="tiny-teacher", engine={"use": "hff"})
    with pytest.raises(Exception, match=r"teacher\.engine"):
        TeacherOptions(model="tiny-teacher", engine={"use": "hf", "max_bach": 3})


# -- tokenizers


def changed(tmp_path, **files):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        saved = json.loads((TINY / name).read_text())
        files.get(name.split(".")[0], lambda saved: None)(saved)
        (tmp_path / name).write_text(json.dumps(saved))
    return tmp_path


def swap(saved):
    vocabulary = saved["model"]["vocab"]
    (a, i), (b, j) = list(vocabulary.items())[300:302]
    vocabulary[a], vocabulary[b] = j, i


def drop(saved):
    vocabulary = saved["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    del vocabulary[last]
    saved["model"]["merges"] = [pair for pair in saved["model"]["merges"] if "".join(pair) != last]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer": swap}, "token .* of the policy's and .* of the teacher's"),
        ({"tokenizer": drop}, r"it has \d+ tokens, the policy's \d+"),
        (
            {"tokenizer_config": lambda saved: saved.update(eos_token="<|pad|>")},
            "ends in '<|pad|>'".replace("|", r"\|"),
        ),
        ({"tokenizer_config": lambda saved: saved.update(chat_template="{{ 1 }}")}, "its chat template is another"),
        ({"tokenizer": lambda saved: saved["model"]["merges"].reverse()}, "divides text in another way"),
    ],
)
def test_another_tokenizer_is_refused_with_what_differs(tmp_path, changes, reason):
    other = changed(tmp_path, **changes)
    with pytest.raises(TokenizerMismatch, match=reason):
        refuse_another(other, TINY, "teacher.big")
    assert difference(other, TINY)


def test_the_committed_teacher_has_the_policys_tokenizer_and_fits_into_four_megabytes():
    refuse_another(TEACHER, TINY, "teacher.big")
    assert sum(path.stat().st_size for path in TEACHER.iterdir()) <= 4 << 20


# -- columns


def test_entries_stay_where_the_loss_counts_and_nowhere_else():
    scored = TopK(
        np.array([0, 0, 2, 3, 5]), np.arange(5, dtype=np.int32), -np.arange(5, dtype=np.float32)
    )  # of four tokens
    trained = np.array([False, True, False, True, False, False])
    kept = at_trained(scored, trained)
    assert kept.offsets.tolist() == [0, 0, 2, 2, 4, 4, 4] and kept.token_ids.tolist() == [0, 1, 3, 4]


def test_numbers_that_are_none_are_refused():
    with pytest.raises(DataError, match="not all finite"):
        of_own_tokens(np.arange(3, dtype=np.int32), np.array([0, -1, np.nan], np.float32))


# -- behind a server


class Served:
    """A real HTTP server that answers as vLLM does, with the teacher's own logprobs."""

    def __init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
        self.troubles = []  # statuses of the next answers
        self.keys = []
        self.name = "big"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def do_GET(self):
                outer.keys.append(self.headers.get("Authorization"))
                self.answer({"data": [{"id": "big"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer({"model": outer.name, "choices": [{"text": "", "prompt_logprobs": outer.scored(body)}]})

            def answer(self, reported):
                status = outer.troubles.pop(0) if outer.troubles else 200
                data = json.dumps(reported).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def scored(self, body):
        ids, k = body["prompt"], body["prompt_logprobs"]
        with torch.no_grad():
            logs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        entries = [None]
        for at in range(1, len(ids)):
            row = logs[at - 1]
            order = row.argsort(descending=True)
            rank = {int(token): place + 1 for place, token in enumerate(order.tolist())}
            named = [*order[:k].tolist(), ids[at]]
            entries.append({str(token): {"logprob": float(row[token]), "rank": rank[token]} for token in named})
        return entries


@pytest.fixture(scope="module")
def served():
    made = Served()
    yield made
    made.http.shutdown()


@pytest.mark.parametrize("kind", ["forward", "reverse"])
async def test_a_server_tells_what_an_engine_does(served, tmp_path, kind):
    groups = [group(rollout(5), rollout(6, 15))]
    options = {"url": served.url, "tokenizer": "tiny-teacher"}
    (there,), _ = await annotated(options, groups, tmp_path, kind)
    (here,), _ = await annotated({"model": "tiny-teacher"}, groups, tmp_path, kind)
    for a, b in zip(there.episodes, here.episodes, strict=True):
        a, b = a.rollouts[0].teacher, b.rollouts[0].teacher
        np.testing.assert_array_equal(a.offsets, b.offsets)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


async def test_a_server_that_answers_as_another_model_than_before_is_named(served, monkeypatch):
    source = server.ServerSource(TeacherOptions(url=served.url, tokenizer="tiny-teacher"), Patience())
    await source.open()
    await source.score([rollout(5).tokens], 1, 1.0)
    monkeypatch.setattr(served, "name", "small")
    with pytest.raises(DataError, match="answers as 'small', and answered as 'big' before: another model is there now"):
        await source.score([rollout(5).tokens], 1, 1.0)
    await source.close()


async def test_a_server_that_is_stopped_is_named_and_given_up_at_the_bound_of_the_run(capfd):
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # the kernel accepts connections, and no process reads them
        url = f"http://127.0.0.1:{stopped.getsockname()[1]}/v1"
        source = server.ServerSource(
            TeacherOptions(url=url, tokenizer="tiny-teacher"), Patience(say_s=0.3, least_s=1.0)
        )
        with pytest.raises(ProcessSilent, match=f"the teacher's server {url} gave no answer to GET /models for"):
            async with asyncio.timeout(20):
                await source.open()
        await source.close()
    assert f"the teacher's server {url} has given no answer to GET /models for" in capfd.readouterr().err


async def test_a_busy_server_is_called_again_and_one_that_refuses_is_not(served, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "PAUSE_S", 0.01)
    monkeypatch.setenv("ATROPOS_TEACHER_KEY", "s3cret")
    options = {"url": served.url, "tokenizer": "tiny-teacher", "top_k": 2}
    served.troubles = [200, 503, 429]
    (made,), _ = await annotated(options, [group(rollout(7))], tmp_path)
    assert made.episodes[0].rollouts[0].teacher is not None and served.keys[-1] == "Bearer s3cret"
    served.troubles = [401]
    with pytest.raises(AccessRefused, match="401") as refused:
        await annotated(options, [group(rollout(7))], tmp_path)
    assert "s3cret" not in str(refused.value)
    served.troubles = [200] + [503] * server.TRIES
    with pytest.raises(ApiError, match="did not answer in 5 tries; the last one: status 503"):
        await annotated(options, [group(rollout(7))], tmp_path)
    served.troubles = []
    with pytest.raises(DataError, match="serves big, and not 'other'"):
        await annotated(options | {"served_model": "other"}, [group(rollout(7))], tmp_path)
    with pytest.raises(
        FitError, match=r"(?s)at temperature 1, but 0.5.*Name teacher.big.model and its engine in place of url"
    ):
        await annotated(options, [group(rollout(7, temperature=0.5))], tmp_path)


def test_answers_of_another_length_are_refused():
    with pytest.raises(RemoteError, match="of 1 positions for 3 tokens"):
        server.top_k_of([None], np.arange(3, dtype=np.int32), 2)


def test_vllm_names_the_token_that_stands_there_whatever_its_rank():
    entries = [None, {"7": {"logprob": -3.0, "rank": 9}, "4": {"logprob": -0.1, "rank": 1}}]
    tokens = np.array([1, 7], np.int32)
    assert server.top_k_of(entries, tokens, 1).token_ids.tolist() == [4]
    assert server.top_k_of(entries, tokens, 0).token_ids.tolist() == [7]


def test_the_plugin_imports_nothing_heavy():
    import subprocess
    import sys

    code = "import sys, atropos_distillation.plugin; print([m for m in ('torch', 'httpx', 'transformers') if m in sys.modules])"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent
    )
    assert ended.stdout.strip() == "[]", ended.stderr
