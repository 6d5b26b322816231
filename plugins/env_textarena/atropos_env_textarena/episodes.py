"""Code that runs in the process that has textarena."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY

from atropos_env_kit.step_host import Shown, StepHost

RAW = "-raw"  # suffix of an id: without the wrappers that write all earlier observations as one text
BOARD, ACTION = textarena.ObservationType.GAME_BOARD, textarena.ObservationType.PLAYER_ACTION


class Game:
    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        given = dict(parameters)
        self._players = given.pop("players")
        self._env = textarena.make(name + RAW, **given)

    def reset(self, seed: int) -> Shown:
        self._env.reset(num_players=self._players, seed=seed)
        return self._shown()

    def step(self, action: str) -> Shown:
        done, _ = self._env.step(action=action)
        if not done:
            return self._shown()
        rewards, _ = self._env.close()
        given = rewards or {}
        return Shown(0, "", [float(given.get(side, 0.0)) for side in range(self._players)], ended=True)

    def _shown(self) -> Shown:
        side, observed = self._env.get_observation()
        return Shown(side, text_of(side, observed, self._env.state.role_mapping))


def text_of(side: int, observed: Iterable[tuple[int, str, Any]], roles: Mapping[int, str]) -> str:
    """What a side is shown: everything since its last action (the rest is in its conversation), with only the last board."""
    kept = [(who, text, kind) for who, text, kind in observed if not (kind is ACTION and who == side)]
    boards = [at for at, (_, _, kind) in enumerate(kept) if kind is BOARD]
    lines = []
    for at, (who, text, kind) in enumerate(kept):
        if kind is not BOARD or at == boards[-1]:
            lines.append(text if who == textarena.GAME_ID else f"[{roles.get(who, who)}] {text}")
    return "\n".join(lines)


def names() -> list[str]:
    return sorted(name for name in ENV_REGISTRY if name + RAW in ENV_REGISTRY)


call = StepHost(Game, names).call
