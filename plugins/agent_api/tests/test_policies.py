"""The server for environments that have their own client."""

from __future__ import annotations

import httpx
import openai
import pytest

from atropos_agent_api.server.policies import serve_policies
from atropos_core.errors import DeadlineExceeded
from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.ledger_engine import LedgerEngine, policy_of
from plugins.agent_api.tests.models import qwen_like

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("qwen")
    qwen_like(folder)
    return folder


async def test_each_session_has_what_was_sampled_for_its_own_key(directory):
    tokenizer = ChatTokenizer(directory)
    engine = LedgerEngine(tokenizer, lambda prompt, seed: f"reply {len(engine.ledger)}")
    served = await serve_policies(directory)
    sessions = [await served.session(policy_of(engine, tokenizer), seed=seed, name=f"task {seed}") for seed in range(2)]
    for session in sessions:
        async with openai.AsyncOpenAI(base_url=session.url, api_key=session.key, max_retries=0) as client:
            answer = await client.chat.completions.create(model="any", messages=USER)
            assert answer.choices[0].message.content == f"reply {len(engine.ledger) - 1}"
    episodes = [session.end() for session in sessions]
    await served.close()
    for episode, entry in zip(episodes, engine.ledger, strict=True):
        [rollout] = episode.rollouts
        assert rollout.tokens[rollout.sampled].tolist() == entry.tokens.tolist()
        assert rollout.logprobs[rollout.sampled].tolist() == entry.logprobs.tolist()
        assert [message["role"] for message in episode.messages] == ["user", "assistant"]
        assert episode.score == 0.0 and episode.metrics["agent/calls"] == 1.0
    assert engine.ledger[0].seed != engine.ledger[1].seed


async def test_a_session_that_has_ended_refuses_calls_and_one_without_calls_has_no_episode(directory):
    tokenizer = ChatTokenizer(directory)
    policy = policy_of(LedgerEngine(tokenizer, lambda prompt, seed: "ok"), tokenizer)
    served = await serve_policies(directory)
    one, other = [await served.session(policy, seed=1, name="task") for _ in range(2)]
    assert one.end() is None
    body = {"model": "any", "messages": USER}
    async with httpx.AsyncClient() as client:
        for session, key, status in ((one, one.key, 409), (other, one.key, 401), (other, other.key, 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert (
                await client.post(f"{session.url}/chat/completions", json=body, headers=headers)
            ).status_code == status
    await served.close()
    await served.close()


async def test_what_the_policy_raised_first_is_there_for_whoever_ends_the_episode(directory):
    class Late(LedgerEngine):
        async def sample(self, *arguments, **keywords):
            raise DeadlineExceeded(f"too late {len(self.ledger)}")

    tokenizer = ChatTokenizer(directory)
    served = await serve_policies(directory)
    session = await served.session(policy_of(Late(tokenizer, lambda prompt, seed: ""), tokenizer), seed=1, name="task")
    assert session.failure is None
    async with openai.AsyncOpenAI(base_url=session.url, api_key=session.key, max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="too late"):
            await client.chat.completions.create(model="any", messages=USER)
    assert isinstance(session.failure, DeadlineExceeded) and session.end() is None
    await served.close()
