"""Our commands for what atroposlib files do as `python FILE evaluate|process|serve`."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from plugins.env_atroposlib.tests.hosted import FILES
from tests.e2e.roles import scene
from tests.pages.blocks import the_block

pytestmark = pytest.mark.slow

LETTERS = f"atroposlib:{FILES / 'one_turn.py'}:Letters"
PAGE = the_block("plugins/env_atroposlib/README.md", "atropos eval --env").commands


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A --set option for the file's data set."""
    shutil.copy(FILES / "one_turn.py", tmp_path / "letters.py")
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"question": f"word {at}"}) + "\n" for at in range(5)))
    return f'environment.letters.datasets={{"someone/words"="{folder}"}}'


def test_evaluate_is_atropos_eval(atropos: Any, words: str) -> None:
    ended = atropos(*shlex.split(PAGE[0])[1:], "--set", words, "--json")
    assert ended.code == 0, ended.err
    metrics = json.loads(ended.out)["metrics"]
    assert metrics["eval/percent_correct"] == 0.25, "what its evaluate() logged"
    assert metrics["eval/asked"] == 2
    ended = atropos(*shlex.split(PAGE[0])[1:], "--set", words, "--set", "environment.letters.evaluates=false", "--json")
    assert ended.code != 0
    assert "held-out" in ended.err, ended.err


def test_process_is_atropos_process_with_the_fields_of_its_own_configuration(
    atropos: Any, words: str, tmp_path: Path
) -> None:
    ended = atropos(*shlex.split(PAGE[1])[1:], "--group-size", "2", "--old-schema", "--set", words)
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert len(row["tokens"]) == 2
        assert all(any(mask != -100 for mask in masks) for masks in row["masks"])
        said = [messages[-1]["content"] for messages in row["messages"]]
        assert row["scores"] == [float(text.count("e")) for text in said]


def test_serve_is_atropos_env_beside_a_trainer_elsewhere(words: str, tmp_path: Path) -> None:
    with scene(tmp_path) as place:
        small = ("--set", "training.groups_per_step=2", "--set", "training.group_size=2")
        trainer = place.train("--model", "toy", *small, "--steps", "3")
        _, _, environment, api, _ = shlex.split(PAGE[2])
        assert api == "--api"
        worker = place.worker(1, environment, "--set", words)
        assert trainer.ends(300) == 0, place.all_text
        assert [line["step"] for line in place.metrics][-1] == 3
        assert worker.terminate(60) == 0, worker.text
        assert int(worker.says(r"(\d+) groups sent")) >= 6
