"""Every client, unmodified, completes a task with a tool, and what the policy sampled for it is trained: all of it, once."""

from __future__ import annotations

import pytest

from atropos_core.builtin.config import GroupAdvantageOptions
from atropos_core.builtin.transforms import GroupAdvantage
from atropos_core.training.batch import to_batch
from tests.agents.clients import CLIENTS
from tests.agents.conftest import Made
from tests.agents.ledgers import sampled, trained, trained_in
from tests.agents.scripted import TITLE, has_tools


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_client_completes_a_task_and_a_step_trains_every_token_that_was_sampled_once(name: str, made: Made):
    client = CLIENTS[name]
    async with made(client) as trial:
        group = await trial.group(2)
    assert group.failed == ()
    assert sorted(group.rewards) == [0.0, 1.0]  # of the file that it left: one has the right answer, one a wrong one
    assert sorted(sum(map(trained, group.episodes), [])) == sampled(trial.engine.ledger)
    for calls in trial.records():
        assert [call["dialect"] for call in calls] == [client.dialect] * len(client.beginnings)
        assert [call["beginning"] for call in calls] == list(client.beginnings)
    for episode in group.episodes:
        assert len(episode.rollouts) == client.rollouts
        assert episode.metrics["agent/delivered_share"] == 1.0 and episode.metrics["agent/orphans"] == 0
    batch = to_batch(await GroupAdvantage(GroupAdvantageOptions())([group]), version=1)
    assert trained_in(batch) == sampled(trial.engine.ledger)
    assert batch.has_logprobs.all() and (batch.advantages != 0).tolist() == batch.trained.tolist()
    assert len(set(batch.episode.tolist())) == 2


@pytest.mark.parametrize("name", ["opencode"])
async def test_the_title_that_opencode_wants_is_not_trained_where_calls_with_tools_are(name: str, made: Made):
    async with made(CLIENTS[name], trained="with_tools") as trial:
        [episode] = (await trial.group(1)).episodes
    replies = [entry for entry in trial.engine.ledger if has_tools(trial.engine.text(entry.prompt))]
    [title] = [entry for entry in trial.engine.ledger if not has_tools(trial.engine.text(entry.prompt))]
    assert trial.engine.text(title.tokens).startswith(TITLE)
    assert trained(episode) == sampled(replies)
    assert episode.metrics["agent/untrained_calls"] == 1
