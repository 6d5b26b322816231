from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_torch_models.stop_ids import stop_ids


@pytest.mark.parametrize("as_mapping", [False, True], ids=["text", "mapping"])
def test_the_tokenizers_own_end_is_one_beside_those_of_the_generation_config(tmp_path: Path, as_mapping: bool) -> None:
    tokenizer = Tokenizer.from_file(str(TOY_MODEL / "tokenizer.json"))
    text = tokenizer.id_to_token(2)
    shutil.copy(TOY_MODEL / "tokenizer.json", tmp_path)
    assert stop_ids(tmp_path, [3, 1]) == {1, 3}
    named = {"eos_token": {"content": text} if as_mapping else text}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert stop_ids(tmp_path, [3, 1]) == {1, 2, 3}
    assert stop_ids(tmp_path, 3) == {2, 3}
    assert stop_ids(tmp_path, None) == {2}


def test_without_a_tokenizer_there_are_those_of_the_generation_config(tmp_path: Path) -> None:
    assert stop_ids(tmp_path, 7) == {7} and stop_ids(tmp_path, None) == set()
