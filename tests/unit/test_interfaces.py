from __future__ import annotations

from typing import Any

import pytest

from atropos_core.errors import PluginError
from atropos_core.interfaces import Environment


@pytest.mark.parametrize(("before", "now"), [("play", "rollout"), ("play_group", "rollout_group")])
def test_an_environment_written_for_the_former_name_is_refused_with_the_new_one(before: str, now: str) -> None:
    async def method(self: Any, task: Any, policy: Any, **keywords: Any) -> Any: ...

    with pytest.raises(PluginError, match=rf"Chess has {before}\(task, policy, ...\), which is called {now}\(\) now"):
        type("Chess", (Environment,), {before: method})


def test_a_method_of_its_own_may_be_called_play() -> None:
    def play(self: Any, move: str) -> str:
        return move

    assert type("Chess", (Environment,), {"play": play})
