"""A server takes up the journal that an earlier one left when it was killed."""

from __future__ import annotations

import tarfile
from typing import Any

import numpy as np

from atropos_core.codec import decode
from tests.native_payloads import open_session
from tests.pins.journal import RECORDED, TOKENS, lease
from tests.raw_http import Connection
from tests.served import atropos_serve, serving


def test_what_no_checkpoint_holds_is_handed_out_again_and_what_one_holds_never(tmp_path):
    with tarfile.open(RECORDED) as packed:
        packed.extractall(tmp_path, filter="data")
    with serving(atropos_serve("--dir", str(tmp_path / "api")), tmp_path / "output") as server:
        end = Connection(server.port)
        session = open_session(end, 1, 2)
        entries: list[Any] = []
        for _ in range(3):  # what was not reported as trained would be leased again
            entries += lease(end, session, 1, tuple(entry["id"] for entry in entries))
        groups = [decode(entry["frame"]) for entry in entries]
        assert sorted(group.rewards[0] for group in groups) == [2.0, 3.0, 4.0]
        assert lease(end, session, 1, tuple(entry["id"] for entry in entries)) == [], "the first is in a checkpoint"
    for group in groups:
        assert [episode.rollouts[0].tokens.tolist() for episode in group.episodes] == TOKENS
        assert np.array_equal(group.episodes[0].rollouts[0].logprobs, np.float32([0, 0, -0.5, -0.25, -0.125]))
        assert group.draw.environment == "words"
