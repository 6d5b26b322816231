"""These tests need reasoning-gym, gem, textarena and openenv, in an environment of their own."""

from __future__ import annotations

import importlib.util

from tests.left_out import NONE_OF_THEM, stand_in

MISSING = [name for name in ("reasoning_gym", "gem", "textarena", "openenv") if importlib.util.find_spec(name) is None]

if MISSING:
    collect_ignore_glob = NONE_OF_THEM


pytest_collect_file = stand_in(__file__, ", ".join(MISSING), "make test-worlds")
