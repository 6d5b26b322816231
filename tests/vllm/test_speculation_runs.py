"""`atropos run` with `engine.speculation`, as on the page: engine and trainer agree, and the metrics say what was accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, metrics_of

pytestmark = pytest.mark.timeout(400)
PAGE = REPOSITORY / "plugins/engine_vllm/README.md"


def test_the_run_of_the_page_says_what_was_accepted(atropos: Any, tmp_path: Path) -> None:
    [command] = re.findall(r"^atropos (run .* --set engine.speculation=ngram .*)$", PAGE.read_text(), re.MULTILINE)
    ended = atropos(*shlex.split(command), "--set", "evaluation.problems=16", "--dir", "run", timeout=300)
    assert ended.code == 0, ended.out + ended.err
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["engine/drafted_tokens"] > 0
        assert 0 <= line["engine/draft_acceptance"] <= 1
        assert line["engine/acceptance_length"] >= 1
        assert line["alignment/max_abs_logprob_diff"] <= 1e-4
    assert not [name for line in lines for name in line if name.startswith("time/engine/step_metrics")]
