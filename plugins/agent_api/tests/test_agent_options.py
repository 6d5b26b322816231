"""The options of environment `agent`, its placeholders and its tasks: what is wrong is refused before anything starts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from atropos_agent_api.config import AgentOptions
from atropos_agent_api.templates import check, fill, of_task, plain
from atropos_core.errors import DataError
from atropos_core.types import Task

AGENT: dict[str, Any] = {"command": ["agent"], "tasks_from": "gsm8k"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks_from": "gsm8k"}, "give an agent as one of command"),
        ({**AGENT, "function": "a:b"}, "give an agent as one of command"),
        ({**AGENT, "command": []}, "command is empty"),
        ({"command": ["agent"]}, "tasks come from one of"),
        ({**AGENT, "tasks": "tasks.jsonl"}, "tasks come from one of"),
        ({"command": ["agent"], "tasks": "tasks.jsonl"}, "nothing scores these tasks"),
        ({**AGENT, "held_out": 0.2}, "held_out has no effect"),
        ({**AGENT, "test_tasks": "more.jsonl"}, "test_tasks has no effect"),
        ({**AGENT, "reward": {}}, "give a reward as one of"),
        ({**AGENT, "reward": {"function": "a:b", "command": ["c"]}}, "give a reward as one of"),
        ({**AGENT, "files": {"a": {"text": "x", "copy_of": "b"}}}, "give a file by one of"),
        ({**AGENT, "command": ["agent", "{base_ulr}"]}, "Did you mean {base_url}?"),
        ({**AGENT, "env": {"GOLD": "{task.answer}"}}, "would give the program the answer"),
        ({**AGENT, "files": {"a": {"text": "{nothing}"}}}, "unknown placeholder {nothing}"),
        ({**AGENT, "stdin": "{task}"}, "unknown placeholder {task}"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        AgentOptions.model_validate(options)
    assert message in str(error.value)


def test_an_environment_of_tasks_is_a_name_or_a_table() -> None:
    table = AgentOptions.model_validate({**AGENT, "tasks_from": {"use": "gsm8k", "problems": 9}})
    assert AgentOptions.model_validate(AGENT).tasks_from is not None
    assert table.tasks_from is not None
    assert (table.tasks_from.use, table.tasks_from.options) == ("gsm8k", {"problems": 9})


def test_only_lower_case_names_in_braces_are_placeholders() -> None:
    values = {"base_url": "http://h/v1", "task.id": "7"}
    text = (
        '{"url": "{base_url}", "of": {"task": "{task.id}"}, "shell": "${HOME}", "kept": "{{base_url}}", "python": {}}'
    )
    check(text, "here")
    assert json.loads(fill(text, values)) == {
        "url": "http://h/v1", "of": {"task": "7"}, "shell": "${HOME}", "kept": "{base_url}", "python": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["{base_url}", "{{base_url}}", "{{{base_url}}}", '{"a": {"b": {}}}', "{a}{{b}}", "{", "f'{x}'"]
)
def test_any_text_has_a_template(text: str) -> None:
    assert fill(plain(text), {"base_url": "x", "a": "x", "b": "x", "x": "y"}) == text


def test_a_value_that_holds_a_placeholder_is_not_filled_again() -> None:
    assert fill("{task.prompt}", {"task.prompt": "{api_key}", "api_key": "secret"}) == "{api_key}"


def test_a_field_that_a_task_has_not_is_named() -> None:
    with pytest.raises(DataError, match=r"\{task.level\}.*task '7' has no such field"):
        fill("{task.level}", of_task(Task("7", ())))


def test_a_task_never_gives_its_answer_away() -> None:
    task = Task("1", ({"role": "user", "content": "two and two"},), answer="4", data={"answer": "4", "level": 3})
    assert "4" not in of_task(task).values()
    assert of_task(task)["task.level"] == "3"
