"""Rows that our generator gives, through SkyRL's own validation, post-processing, tensors and advantages, against a
computation by hand."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("skyrl", reason="needs SkyRL, in an environment of its own: `make test-skyrl`")

from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train.generators.utils import (
    apply_overlong_filtering,
    concatenate_generator_outputs,
    merge_stepwise_output,
    prepare_generator_input,
)
from skyrl.train.utils.trainer_utils import handle_dynamic_sampling, validate_generator_output, zero_variance_filter
from skyrl.train.utils.trajectory_logging import TrajectoryLogger
from skyrl.utils.tok import get_tokenizer

from atropos_adapter_skyrl.dataset import TaskDataset, blocks_of
from atropos_adapter_skyrl.engine import sampling_of
from atropos_adapter_skyrl.generator import AtroposGenerator, seed_of
from atropos_adapter_skyrl.number_list import NumberList
from atropos_adapter_skyrl.source import Here, RolloutsFailed
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.config.run_file import Layer, load
from atropos_core.errors import DataError
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward
from atropos_core.rollouts.source import LocalSource
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Draw, Episode, Rollout, Score
from tests.skyrl.parts import Adder, Sevens, TableClient, TableDispatch, config, parts_of, plain, trainer_of

TOKENIZER = ChatTokenizer(TOY_MODEL)


class Opened(Here):
    """Opens itself, for tests that call generate() without a training around it."""

    async def fetch(self, requested, params, *, step_wise):
        if self._parts is None:
            await self.open()
        return await super().fetch(requested, params, step_wise=step_wise)


def here(client=None, *, attempts=1, deadline_s=20.0, **environments):
    async def build(engine):
        return await parts_of(engine, **environments)

    return Opened(build, client or TableClient(), TOKENIZER, deadline_s=deadline_s, attempts=attempts)


def given(cfg, environments, rows, *, phase="train", step=1, n=None):
    """SkyRL's own GeneratorInput for these rows of the data set."""
    data = TaskDataset(environments, "train" if phase == "train" else "test")
    params = get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)
    return prepare_generator_input([data[row] for row in rows], n or 4, params, "", phase, step)


class Graded(Sevens):
    """Replies whose reward and whose delay come from a table."""

    async def rollout(self, task, policy, *, seed):
        await asyncio.sleep(random.Random(seed).random() / 50)
        episode = await super().rollout(task, policy, seed=seed)
        return Episode(episode.rollouts, score=float(seed % 7), metrics={"seed": float(seed % 1000)})


async def test_skyrl_accepts_the_rows_and_its_advantages_are_those_computed_by_hand(tmp_path):
    cfg = config(tmp_path, **{"generator.n_samples_per_prompt": 4})
    environments = {"graded": Graded()}
    trainer = trainer_of(
        cfg, source := here(graded=environments["graded"]), environments, TableDispatch(cfg, None, 1.0)
    )
    requested, uids = given(cfg, environments, [5, 3, 9, 60])
    output = plain(await AtroposGenerator(source, seed=3).generate(requested))
    validate_generator_output(16, output)
    hand = [
        float(seed % 7) for block in blocks_of(requested) for seed in _member_seeds(seed_of(3, "train", 1, block, 0), 4)
    ]
    assert output["rewards"] == hand, "in the order of the input, although rollouts end in another"
    assert output["rollout_metrics"]["atropos/mean_reward"] == pytest.approx(np.mean(hand))
    lengths = [len(row) for row in output["response_ids"]]
    processed, uids = trainer.postprocess_generator_output(dict(output), uids)
    assert [row[-1] for row in processed["rewards"]] == hand
    assert all(sum(row) == row[-1] for row in processed["rewards"])
    data = trainer.convert_to_training_input(processed, uids)
    longest = max(lengths)
    for at, length in enumerate(lengths):
        whole = output["prompt_token_ids"][at] + output["response_ids"][at]
        assert data["sequences"][at].tolist()[-len(whole) :] == whole
        assert data["attention_mask"][at].sum() == len(whole)
        assert data["response_mask"][at].tolist() == [0] * (longest - length) + [1] * length
        assert data["rollout_logprobs"][at].tolist()[longest - length :] == output["rollout_logprobs"][at]
        assert data["loss_mask"][at].tolist()[longest - length :] == output["loss_masks"][at]
    data["values"] = None
    got = trainer.compute_advantages_and_returns(data)["advantages"].numpy()
    rewards = np.array(hand).reshape(4, 4)
    by_hand = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    wanted = by_hand.reshape(16, 1) * data["response_mask"].numpy()
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert np.abs(wanted).max() > 0.5


def _member_seeds(seed, n):
    from atropos_core.seeds import derive

    return [derive(seed, member) for member in range(n)]


NUMBERS = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")


async def test_rows_without_a_copy_become_the_very_tensors_that_lists_become(tmp_path):
    """Also with the masks that SkyRL's filter of flat groups makes."""
    cfg = config(tmp_path, **{"generator.n_samples_per_prompt": 4, "trainer.algorithm.zero_variance_filter": True})
    adder = Adder()
    trainer = trainer_of(cfg, source := here(adder=adder), {"adder": adder}, TableDispatch(cfg, None, 1.0))
    requested, uids = given(cfg, {"adder": adder}, [1, 2, 3, 4])
    output = await AtroposGenerator(source).generate(requested)
    assert {type(one) for name in NUMBERS[:3] for one in output[name]} == {NumberList}
    assert {type(one) for one in output["rollout_logprobs"]} == {np.ndarray}
    output["rewards"][:4] = [0.5] * 4  # a flat group
    made = []
    for one in (dict(output), plain(output)):
        validate_generator_output(16, one)
        processed, ids = trainer.postprocess_generator_output(one, list(uids))
        made.append(trainer.convert_to_training_input(processed, ids))
    assert set(made[0]) == set(made[1]) and not made[0]["loss_mask"][:4].any() and made[0]["loss_mask"][4:].any()
    for name, tensor in made[0].items():
        other = made[1][name]
        assert (tensor is None and other is None) or (tensor.dtype == other.dtype and tensor.equal(other)), name


async def test_whatever_skyrl_does_with_rows_it_does_alike_with_lists_of_them(tmp_path):
    cfg, adder = config(tmp_path), Adder()
    requested, uids = given(cfg, {"adder": adder}, [1, 2, 3, 4], n=4)
    output = await AtroposGenerator(here(adder=adder)).generate(requested)
    output["rewards"][:4] = [0.5] * 4
    tokenizer, logger = get_tokenizer(str(TOY_MODEL)), TrajectoryLogger()
    sampling = {"type": "replace", "min_replace_ratio": 0.3, "n_samples_per_prompt": 4}

    def done(output):
        ids, masks = output["response_ids"], output["loss_masks"]
        joined = concatenate_generator_outputs([dict(output), dict(output)])
        np.random.seed(1)
        copied = {name: list(column) if type(column) is list else column for name, column in output.items()}
        replaced = handle_dynamic_sampling(copied, list(uids), sampling)[0]
        return {
            "text": [tokenizer.decode(row) for row in [*output["prompt_token_ids"], *ids]],
            "shown": [logger.format_trajectory(None, *row, tokenizer) for row in zip(ids, masks, strict=True)],
            "turns": [logger.count_assistant_turns(mask) for mask in masks],
            "overlong": plain({"": apply_overlong_filtering(masks, ["stop", "length"] * 8)}),
            "live": zero_variance_filter(output["rewards"], uids, loss_masks=masks),
            "joined": plain(joined)["response_ids"], "metrics": joined["rollout_metrics"],
            "replaced": [plain(replaced)[name] for name in NUMBERS],
        }  # fmt: skip

    found, wanted = done(output), done(plain(output))
    assert found == wanted
    assert found["turns"] == [3] * 16 and found["live"] == list(range(4, 16))
    assert found["replaced"][1][:4] != plain(output)["response_ids"][:4]


async def test_one_reply_has_prompt_response_mask_logprobs_versions_and_stop_reason(tmp_path):
    cfg, client = config(tmp_path), TableClient()
    source = here(client, sevens=Sevens())
    await source.set_version(7)
    requested, _ = given(cfg, {"sevens": Sevens()}, [0])
    output = plain(await AtroposGenerator(source).generate(requested))
    for at, response in enumerate(output["response_ids"]):
        assert output["prompt_token_ids"][at] == TOKENIZER.render(requested["prompts"][at]).tolist()
        assert 1 <= len(response) <= 2 and output["loss_masks"][at] == [1] * len(response)
        assert output["stop_reasons"][at] == ("stop" if response[-1] == 0 else "length")
        assert output["policy_versions"][at] == [7] * len(response)
        np.testing.assert_allclose(output["rollout_logprobs"][at], np.log(1 / 100), rtol=1e-6)
    assert all(type(value) is int for row in output["response_ids"] + output["loss_masks"] for value in row)
    assert output["is_last_step"] is None and output["rollout_expert_indices"] is None
    assert len(client.finished) == len(set(client.finished)) == 4, "each session of the router is ended once"
    params = client.requested[0]["sampling_params"]
    assert params["top_k"] == -1 and params["include_stop_str_in_output"] and params["max_tokens"] == 2


async def test_several_turns_are_one_row_whose_tool_messages_are_not_trained(tmp_path):
    cfg, adder = config(tmp_path), Adder()
    requested, _ = given(cfg, {"adder": adder}, [1, 2])
    output = plain(await AtroposGenerator(here(adder=adder)).generate(requested))
    validate_generator_output(8, output)
    for mask, logprobs, ids in zip(
        output["loss_masks"], output["rollout_logprobs"], output["response_ids"], strict=True
    ):
        runs = sum(now and not before for now, before in zip(mask, [0, *mask[:-1]], strict=True))
        assert runs == 3 and mask[0] == 1 and len(mask) == len(ids)
        assert all((value == 0.0) == (not counted) for value, counted in zip(logprobs, mask, strict=True))
    assert len(adder.calls) == 16 and all(adder.calls.count(call) == 2 for call in adder.calls), "tools act once"


async def test_step_by_step_each_reply_is_a_row_and_skyrl_merges_them_to_the_whole(tmp_path):
    cfg = config(tmp_path, **{"generator.step_wise_trajectories": True})
    requested, _ = given(cfg, {"adder": Adder()}, [1, 2])
    whole = plain(await AtroposGenerator(here(adder=Adder()), seed=1).generate(requested))
    output = plain(await AtroposGenerator(here(adder=Adder()), seed=1, step_wise=True).generate(requested))
    assert len(output["response_ids"]) == 24 and output["is_last_step"] == [False, False, True] * 8
    validate_generator_output(8, output, step_wise=True)
    assert output["trajectory_ids"] == [one for one in requested["trajectory_ids"] for _ in range(3)]
    merged = merge_stepwise_output(output)
    for name in ("prompt_token_ids", "response_ids", "rollout_logprobs", "loss_masks", "rewards", "stop_reasons"):
        assert merged[name] == whole[name], name


async def test_step_wise_advantages_are_those_of_the_last_step_on_every_reply(tmp_path):
    cfg = config(tmp_path, **{"generator.step_wise_trajectories": True, "generator.n_samples_per_prompt": 4})
    environments = {"adder": Adder()}
    source = here(adder=environments["adder"])
    trainer = trainer_of(cfg, source, environments, TableDispatch(cfg, None, 1.0))
    requested, _ = given(cfg, environments, [1, 2, 3, 4])
    output = plain(await AtroposGenerator(source, seed=11, step_wise=True).generate(requested))
    uids = [one.instance_id for one in output["trajectory_ids"]]
    last = np.array(output["rewards"])[np.array(output["is_last_step"])].reshape(4, 4)
    processed, uids = trainer.postprocess_generator_output(dict(output), uids)
    data = trainer.convert_to_training_input(processed, uids)
    data["values"] = None
    got = trainer.compute_advantages_and_returns(data)["advantages"].numpy()
    by_hand = (last - last.mean(1, keepdims=True)) / (last.std(1, ddof=1, keepdims=True) + 1e-6)
    wanted = np.repeat(by_hand.reshape(16), 3)[:, None] * data["response_mask"].numpy()
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert np.abs(wanted).max() > 0.5


async def test_an_episode_that_rewrote_its_history_wants_step_wise_rows(tmp_path):
    class Rewriter(Sevens):
        async def rollout(self, task, policy, *, seed):
            from atropos_core.conversation import Conversation

            talk = Conversation(policy, seed=seed)
            await talk.reply(*task.messages)
            talk.start_over()
            await talk.reply({"role": "user", "content": "anew"})
            return talk.episode(Score(1.0))

    cfg = config(tmp_path)
    requested, _ = given(cfg, {"rewriter": Rewriter()}, [0])
    with pytest.raises(DataError, match=r"2 token histories(.|\n)*step_wise_trajectories=true"):
        await AtroposGenerator(here(rewriter=Rewriter())).generate(requested)
    output = plain(await AtroposGenerator(here(rewriter=Rewriter()), step_wise=True).generate(requested))
    validate_generator_output(4, output, step_wise=True)
    assert len(output["response_ids"]) == 8


class Flaky(Sevens):
    """Every rollout fails the first `failures` times that its task is tried."""

    def __init__(self, failures):
        super().__init__()
        self.left = failures

    async def rollout(self, task, policy, *, seed):
        if self.left > 0:
            self.left -= 1
            raise ValueError("the tool is away")
        return await super().rollout(task, policy, seed=seed)


class Counted(Sevens):
    failures = 0

    async def rollout(self, task, policy, *, seed):
        self.failures += 1
        raise ValueError(f"failure {self.failures} of 12")


async def test_a_rollout_that_fails_is_run_again_and_no_filler_row_takes_its_place(tmp_path):
    cfg = config(tmp_path)
    requested, _ = given(cfg, {"flaky": Flaky(0)}, [0, 1])
    output = plain(await AtroposGenerator(here(flaky=Flaky(5), attempts=3)).generate(requested))
    validate_generator_output(8, output)
    assert all(sum(mask) == len(mask) for mask in output["loss_masks"])
    assert output["rollout_metrics"]["atropos/requeued"] == 5


async def test_a_rollout_that_fails_every_time_is_raised_with_its_cause(tmp_path):
    cfg = config(tmp_path)
    requested, _ = given(cfg, {"flaky": Flaky(0)}, [0, 1])
    with pytest.raises(RolloutsFailed, match=r"environment 'flaky' failed 2 times(.|\n)*the tool is away"):
        await AtroposGenerator(here(flaky=Flaky(10**6), attempts=2)).generate(requested)
    first = given(cfg, {"flaky": Flaky(0)}, [0])[0]
    with pytest.raises(RolloutsFailed, match=r"failed 3 times; the last time in rollout: ValueError: failure 12 of 12"):
        await AtroposGenerator(here(flaky=(flaky := Counted()), attempts=3)).generate(first)
    assert flaky.failures == 12, "four rollouts, three times each"


class Moody:
    """A reward that raises the first `failures` times that it is called."""

    def __init__(self, failures):
        self.left, self.requested = failures, 0

    async def __call__(self, task, episodes):
        self.requested += 1
        if self.left > 0:
            self.left -= 1
            raise ValueError("the judge is away")
        return [1.0] * len(episodes)


def judged(reward, *, attempts, **environments):
    async def build(engine):
        return replace(await parts_of(engine, **environments), rewards=[WeightedReward("judge", reward, 1.0, 20.0)])

    return Opened(build, TableClient(), TOKENIZER, deadline_s=20.0, attempts=attempts)


async def test_a_group_whose_reward_fails_is_run_again_under_other_seeds(tmp_path):
    class Seeds(Sevens):
        seen: tuple[int, ...] = ()

        async def rollout(self, task, policy, *, seed):
            self.seen += (seed,)
            return await super().rollout(task, policy, seed=seed)

    cfg, environment = config(tmp_path), Seeds()
    requested, _ = given(cfg, {"seeds": environment}, [0])
    output = plain(
        await AtroposGenerator(judged(reward := Moody(2), attempts=3, seeds=environment)).generate(requested)
    )
    validate_generator_output(4, output)
    assert output["rewards"] == [1.0] * 4 and output["rollout_metrics"]["atropos/requeued"] == 8
    assert reward.requested == 3 and len(set(environment.seen)) == len(environment.seen) == 12


async def test_a_reward_that_fails_every_time_is_raised_with_its_cause_and_no_rollout_that_was_recovered(tmp_path):
    cfg = config(tmp_path)
    requested, _ = given(cfg, {"flaky": Flaky(0)}, [0])
    source = judged(reward := Moody(10**6), attempts=3, flaky=Flaky(2))
    with pytest.raises(
        RolloutsFailed, match=r"'flaky' failed 3 times; the last time in reward: (.|\n)*the judge is away"
    ):
        await AtroposGenerator(source).generate(requested)
    assert reward.requested == 3


async def test_a_late_rollout_is_raised_and_what_ran_beside_it_is_cancelled(tmp_path):
    class Late(Sevens):
        cancelled = 0

        async def rollout(self, task, policy, *, seed):
            try:
                await asyncio.sleep(60 if task.id == "train-0" else 0)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return await super().rollout(task, policy, seed=seed)

    cfg, late = config(tmp_path), Late()
    requested, _ = given(cfg, {"late": late}, [0, 1])
    with pytest.raises(RolloutsFailed, match="no answer within 1 s"):
        await AtroposGenerator(here(late=late, deadline_s=1.0)).generate(requested)
    assert late.cancelled == 4


async def test_an_engine_that_aborts_or_says_no_logprobs_is_an_error_and_no_row(tmp_path):
    class Aborting(TableClient):
        async def generate(self, batch, model=None):
            return await super().generate(batch, model) | {"stop_reasons": ["abort"]}

    class Silent(TableClient):
        async def generate(self, batch, model=None):
            return await super().generate(batch, model) | {"response_logprobs": [None]}

    cfg = config(tmp_path)
    requested, _ = given(cfg, {"sevens": Sevens()}, [0])
    for client, cause in ((Aborting(), "ended a sample with 'abort'"), (Silent(), "and no logprobs")):
        with pytest.raises(RolloutsFailed, match=cause):
            await AtroposGenerator(here(client, sevens=Sevens())).generate(requested)


class Served:
    """The routes of SkyRL's inference router that its client uses here, over the toy engine."""

    def __init__(self):
        self.table = TableClient()
        self.sessions: list[str] = []
        self.requested: Counter[str] = Counter()
        app = web.Application()
        app.add_routes([web.post("/inference/v1/generate", self.generate), web.post("/finish_session", self.finish)])
        self.runner = web.AppRunner(app)

    async def __aenter__(self):
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        self.client = RemoteInferenceClient(
            url, [url], data_parallel_size=1, model_name="toy", tokenizer=get_tokenizer(str(TOY_MODEL))
        )
        return self

    async def __aexit__(self, *raised):
        await (await self.client._get_session()).close()
        await self.runner.cleanup()

    async def generate(self, request):
        requested = await request.json()
        assert requested["model"] == "toy"
        self.requested[request.headers["X-Session-ID"]] += 1
        params = requested["sampling_params"]
        prompt = np.array(requested["token_ids"], np.int32)
        [one] = await self.table.engine.sample(prompt, 1, sampling_of(params), [params["seed"]], 60.0)
        content = [{"logprob": value} for value in one.logprobs.tolist()]
        choice = {"token_ids": one.tokens.tolist(), "finish_reason": one.finish, "logprobs": {"content": content}}
        return web.json_response({"choices": [choice]})

    async def finish(self, request):
        self.sessions.append(request.query["session_id"])
        return web.json_response({})


async def test_skyrls_real_inference_client_over_http_gives_the_same_rows(tmp_path):
    cfg, environments = config(tmp_path), {"adder": Adder()}
    requested, _ = given(cfg, environments, [4, 1])
    async with Served() as served:
        far = await AtroposGenerator(here(served.client, adder=Adder()), seed=9).generate(requested)
        assert len(served.sessions) == len(set(served.sessions)) == 8, "one for each rollout, and ended once"
        assert served.requested == dict.fromkeys(served.sessions, 3), "all three turns of a rollout in its own"
    near = await AtroposGenerator(here(adder=Adder()), seed=9).generate(requested)
    for name in ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "stop_reasons"):
        assert far[name] == near[name], name
    np.testing.assert_allclose(far["rollout_logprobs"][0], near["rollout_logprobs"][0], rtol=1e-6)


async def test_two_hundred_calls_at_a_time_get_each_their_own_rows(tmp_path):
    cfg, graded = config(tmp_path), Graded()
    environments = {"graded": graded}
    generator = AtroposGenerator(here(graded=graded), seed=5)
    requested = [given(cfg, environments, [call % 64], step=call // 64, n=2)[0] for call in range(200)]
    outputs = await asyncio.gather(*(generator.generate(one) for one in requested))
    for number, (one, output) in enumerate(zip(requested, outputs, strict=True)):
        [block] = blocks_of(one)
        wanted = [float(seed % 7) for seed in _member_seeds(seed_of(5, "train", number // 64, block, 0), 2)]
        assert output["rewards"] == wanted
        assert output["prompt_token_ids"][0] == TOKENIZER.render(one["prompts"][0]).tolist()


async def test_the_same_task_again_in_a_step_in_another_step_or_in_an_evaluation_is_run_anew(tmp_path):
    cfg, environments = config(tmp_path), {"graded": Graded()}
    generator = AtroposGenerator(here(graded=environments["graded"]), seed=5)
    seeds = []
    for phase, step in (("train", 1), ("train", 1), ("eval", 1), ("train", 2), ("eval", 1)):
        output = await generator.generate(given(cfg, environments, [3], phase=phase, step=step)[0])
        seeds.append([metrics["seed"] for metrics in output["env_metrics"]])
    assert len({tuple(one) for one in seeds}) == 5
    again = await AtroposGenerator(here(graded=Graded()), seed=5).generate(given(cfg, environments, [3])[0])
    assert [metrics["seed"] for metrics in again["env_metrics"]] == seeds[0], "and the same in another run of this seed"


@pytest.mark.parametrize("environment", [Sevens, Adder])
async def test_our_own_loop_and_skyrls_path_see_the_same_tokens_masks_and_rewards(environment, tmp_path):
    """The same scripted policy (a table and its seeds), the same draws: once as a run of ours runs them, into its hub."""
    cfg = config(tmp_path)
    client, environments = TableClient(), {"one": environment()}
    client.engine.weights["table"][:] = np.random.Generator(np.random.Philox(key=3)).normal(size=(100, 100))
    client.engine.weights["table"][:, TOKENIZER.encode("7")] += 4
    requested, _ = given(cfg, environments, [4, 1, 7])
    output = plain(await AtroposGenerator(here(client, one=environments["one"]), seed=9).generate(requested))

    draws = [block.draw(at, seed_of(9, "train", 1, block, 0)) for at, block in enumerate(blocks_of(requested))]

    class Given:
        def open(self, sources: object) -> None:
            pass

        def draw(self, n: int) -> list[Draw]:
            return [draws.pop(0) for _ in range(n)]

    run = load([Layer("test", {"environment": {"one": {"use": "one"}}, "sampling": {"max_tokens": 2},
                               "training": {"group_size": 4, "groups_per_step": 3}})]).config  # fmt: skip
    parts = await parts_of(client.engine, one=environment())
    rollout_runner = RolloutRunner(
        parts.environments, parts.rewards, client.engine, TOKENIZER, deadline_s=20, deterministic=True
    )
    loop = LocalSource(run, rollout_runner, Given())
    await loop.open(None)
    loop.request(3)
    groups = [leased.group for leased in await loop.lease(3, 0, 20)]
    await loop.stop()
    await loop.close()
    rollouts: list[tuple[Rollout, float]] = [
        (episode.rollouts[0], float(reward))
        for group in sorted(groups, key=lambda group: group.draw.id)
        for episode, reward in zip(group.episodes, group.rewards, strict=True)
    ]
    for at, (rollout, reward) in enumerate(rollouts):
        ids = output["prompt_token_ids"][at] + output["response_ids"][at]
        prompt = len(output["prompt_token_ids"][at])
        assert ids == rollout.tokens.tolist()
        assert output["loss_masks"][at] == rollout.trained[prompt:].astype(int).tolist()
        assert output["rollout_logprobs"][at] == rollout.logprobs[prompt:].tolist()
        assert output["rewards"][at] == reward
    assert len(rollouts) == 12 and len(set(output["rewards"])) > 1


async def test_rollouts_of_one_version_share_a_prefix_cache_and_those_of_another_do_not(tmp_path):
    async def build(engine):
        return await parts_of(engine, sevens=Sevens())

    client = TableClient()
    source = Opened(build, client, TOKENIZER, deadline_s=20.0, attempts=1, salted=True)
    for version in (3, 4):
        await source.set_version(version)
        await AtroposGenerator(source).generate(given(config(tmp_path), {"sevens": Sevens()}, [0, 1])[0])
    assert [one["cache_salt"] for one in client.requested] == ["3"] * 8 + ["4"] * 8
