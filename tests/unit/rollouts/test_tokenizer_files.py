"""Files of a tokenizer that are damaged, or of another form: what cannot be read is one error, which names the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import atropos_core.builtin
from atropos_core.errors import ConfigError
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.storage.reading import base_of_adapter

MODEL = Path(atropos_core.builtin.__file__).parent / "toy_model"
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
CONTENTS = {
    "nothing": b"", "half": b'{"a": ', "a list": b"[1]", "a number": b"7", "not UTF-8": b'{"a": "\xff"}', "deep": b'{"a":' + b"[" * 10**5,
    "no names": b"{}",
}  # fmt: skip


def used(directory: Path) -> None:
    tokenizer = ChatTokenizer(directory)
    tokenizer.render([{"role": "user", "content": "a"}])
    assert tokenizer.dropped is not None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named(file: str, content: str, model: Path) -> None:
    (model / file).write_bytes(CONTENTS[content])
    if content == "no names" and file != "tokenizer.json":
        try:
            used(model)
        except ConfigError as error:
            assert "chat template" in str(error)
        return
    with pytest.raises(ConfigError, match=file):
        used(model)


def test_a_directory_in_a_files_place_is_named(model: Path) -> None:
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    (model / "special_tokens_map.json").mkdir()
    with pytest.raises(ConfigError, match="it is a directory"):
        used(model)


@pytest.mark.parametrize("token", [7, [1], {"no": "content"}, {"content": 7}, True])
def test_a_special_token_that_is_not_a_text_is_named(token: object, model: Path) -> None:
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": token}))
    with pytest.raises(ConfigError, match="a special token .* not a text"):
        used(model)


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"base_model_name_or_path": null}', '{"base_model_name_or_path": 7}']
)
def test_an_adapter_that_names_no_base_model_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ConfigError, match="adapter_config.json does not name"):
        base_of_adapter(tmp_path)
