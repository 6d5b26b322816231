from __future__ import annotations

import pytest

from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.models import qwen_like


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A tokenizer whose template knows tools and reasoning."""
    return qwen_like(tmp_path_factory.mktemp("qwen"))
