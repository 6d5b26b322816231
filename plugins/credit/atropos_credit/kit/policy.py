"""A policy of tabular logits, with every episode that it can sample."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from atropos_credit.kit.worlds import Reply, World
from atropos_credit.turns import Turns, Values

Node = tuple[Hashable, Reply]  # a state, and the tokens of the reply so far
TOKENS = 2  # in the vocabulary


@dataclass(frozen=True)
class Listed:
    """The E episodes of a policy with P parameters."""

    world: World
    episodes: tuple[Turns, ...]  # [E]
    probabilities: Values  # [E]
    scores: tuple[Values, ...]  # of each episode [L, P]: the gradient of the log-probability of each token

    def gradient_of(self, values: Values) -> Values:
        """[P] The gradient of the sum of probability times value [E]."""
        made = np.zeros(self.scores[0].shape[1])
        for weight, score in zip(self.probabilities * values, self.scores, strict=True):
            made += weight * score.sum(0)
        return made


def listed(world: World, seed: int = 0, logits: Values | None = None) -> Listed:
    """List the episodes of a policy with these logits [P], or with normal ones drawn from the seed."""
    nodes = {node: at for at, node in enumerate(_nodes(world))}
    size = TOKENS * len(nodes)
    drawn = np.random.default_rng(seed).normal(size=size) if logits is None else logits
    table = drawn.reshape(len(nodes), TOKENS)
    logs = table - np.log(np.exp(table).sum(1, keepdims=True))
    episodes, probabilities, scores = [], [], []
    for turns, taken in _episodes(world):
        score = np.zeros((len(taken), len(nodes), TOKENS))
        log = 0.0
        for at, (node, token) in enumerate(taken):
            log += logs[nodes[node], token]
            score[at, nodes[node]] -= np.exp(logs[nodes[node]])
            score[at, nodes[node], token] += 1.0
        episodes.append(turns)
        probabilities.append(np.exp(log))
        scores.append(score.reshape(len(taken), size))
    return Listed(world, tuple(episodes), np.array(probabilities), tuple(scores))


def _nodes(world: World) -> list[Node]:
    found: dict[Node, None] = {}
    for _, taken in _episodes(world):
        found.update(dict.fromkeys(node for node, _ in taken))
    return list(found)


def _episodes(world: World) -> Iterator[tuple[Turns, list[tuple[Node, int]]]]:
    yield from _continued(world, world.start, [], [], [])


def _continued(
    world: World,
    state: Hashable,
    rewards: list[float],
    states: list[Hashable],
    replies: list[Reply],
) -> Iterator[tuple[Turns, list[tuple[Node, int]]]]:
    for reply in world.replies:
        step = world.step(state, reply)
        now = ([*rewards, step.reward], [*states, state], [*replies, reply])
        if step.state is not None and len(now[0]) < world.turns:
            yield from _continued(world, step.state, *now)
            continue
        turns = Turns(np.array(now[0]), step.outcome, tuple(now[1]), tuple(len(one) for one in now[2]))
        yield (
            turns,
            [
                ((where, one[:at]), token)
                for where, one in zip(now[1], now[2], strict=True)
                for at, token in enumerate(one)
            ],
        )
