"""Whatever a client does: trained ids are the sampled ones, each once, none without its logprob and version."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from atropos_agent_api.tokens.formats import TemplateFormat
from atropos_agent_api.tokens.renderer_format import RendererFormat
from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.adversary import FormatOf, episode
from plugins.agent_api.tests.families import write
from plugins.agent_api.tests.models import merging, qwen_like

QWEN3 = (Path(__file__).parent / "qwen3.jinja").read_text()
KINDS = ("template", "merging", "stripping", "qwen3", "glm-4.5", "llama-3", "kimi-k2")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ChatTokenizer, FormatOf]]:
    made: dict[str, tuple[ChatTokenizer, FormatOf]] = {
        "template": (qwen_like(tmp_path_factory.mktemp("qwen")), TemplateFormat),
        "merging": (merging(tmp_path_factory.mktemp("merging")), TemplateFormat),
        "stripping": (write("qwen3", tmp_path_factory.mktemp("stripping"), QWEN3), TemplateFormat),
    }
    for name in ("qwen3", "glm-4.5", "llama-3", "kimi-k2"):
        tokenizer = write(name, tmp_path_factory.mktemp("family"), QWEN3)
        format = RendererFormat(name, tokenizer)
        made[name] = (tokenizer, lambda policy, tokenizer, format=format: format)
    return made


async def episodes(of: tuple[ChatTokenizer, FormatOf], seeds: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            total += await episode(seed, *of)
        except Exception as error:
            error.add_note(f"episode {seed}")
            raise
    return total


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_does_what_clients_do(kinds: dict[str, tuple[ChatTokenizer, FormatOf]], kind: str):
    total = await episodes(kinds[kind], range(40))
    assert total["episodes"] == 40 and total["trained"] > 0.5 * total["sampled"] > 0
    for what in ("orphans", "begun_extended", "begun_edited", "begun_new", "go_away", "retry", "twice", "lose"):
        assert total[what] > 0, f"{what} did not happen"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
async def test_a_thousand_episodes_of_all_kinds_together(kinds: dict[str, tuple[ChatTokenizer, FormatOf]], kind: str):
    total = await episodes(kinds[kind], range(1000, 1000 + 1050 // len(KINDS)))
    print(kind, dict(total))
    assert total["episodes"] == 150
