"""Tasks in files: what is read of each format, and what is said of a row that is none."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from atropos_core.errors import DataError
from atropos_core.rollouts.task_files import Columns, read_rows, read_tasks, split_tasks, value_at
from atropos_core.types import Task

ROWS = [
    {"question": "1 + 1?", "gold": "2", "level": "1"},
    {"question": 'two,\u2028\n"three"?', "gold": "5", "level": "2"},
]
COLUMNS = Columns("question", "gold", "Add.")


def written(path: Path) -> Path:
    """ROWS, in the format that the name says."""
    if path.suffix == ".csv":
        lines = [",".join(f'"{value.replace(chr(34), chr(34) * 2)}"' for value in row.values()) for row in ROWS]
        path.write_text("\r\n".join([",".join(ROWS[0]), *lines, ""]), newline="")
    elif path.suffix == ".parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    elif path.name == "list.json":
        path.write_text(json.dumps(ROWS, indent=1))
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "lines.json", "list.json", "rows.csv", "rows.parquet", "rows"])
def test_a_file_of_any_format_has_the_same_tasks(tmp_path: Path, name: str) -> None:
    assert read_tasks(written(tmp_path / name), COLUMNS) == [
        Task(
            str(number),
            ({"role": "system", "content": "Add."}, {"role": "user", "content": row["question"]}),
            row["gold"],
            {"level": row["level"]},
        )
        for number, row in enumerate(ROWS, 1)
    ]


def test_a_parquet_of_messages_has_no_more_than_was_written(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "system", "content": "s"}, {"role": "assistant", "name": "x"}, {"role": "user", "content": "a"}]
    row = {"prompt": chat, "reward_model": {"style": "rule", "ground_truth": "4"}, "made": date(2026, 1, 2)}
    parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "verl.parquet")
    [task] = read_tasks(tmp_path / "verl.parquet", Columns(answer="reward_model.ground_truth", instruction="not this"))
    assert task.messages == (chat[0], {**chat[1], "content": None}, chat[2])
    assert task.answer == "4"
    assert task.data["made"] == "2026-01-02"


def test_a_dot_leads_into_a_table_unless_the_column_is_called_so() -> None:
    row = {"a": {"b": {"c": 1}}, "a.d": 2}
    assert [value_at(row, name) for name in ("a.b.c", "a.d", "a.x", "a.b.c.d", "x")] == [1, 2, None, None, None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "there is no file of tasks .*none.jsonl"),
        ("none.parquet", None, "there is no file of tasks .*none.parquet"),
        ("a.jsonl", b"\xff\xfe{", "a.jsonl cannot be read: 'utf-8' codec"),
        ("a.json", b"[1]", "a.json, row 1 is not a JSON object, but 1"),
        ("a.json", b"[{]", "a.json is not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1 is not JSON"),
        ("a.csv", b"prompt,answer\na\n", "a.csv, line 2 has more or fewer values"),
        ("a.csv", b"prompt,answer\na,b,c\n", "a.csv, line 2 has more or fewer values"),
        ("a.csv", b'prompt,answer\n"a,b\n', "a.csv is not CSV, after line 1"),
        ("a.csv", b"prompt,answer\n", "a.csv has no tasks"),
        ("a.parquet", b"PAR1 and no more", "a.parquet cannot be read as parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_tasks(tmp_path / name)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: .*Is a directory"):
        list(read_rows(tmp_path))


def test_tasks_are_read_with_their_own_fields(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"prompt": "a", "system": "s", "answer": 4, "level": 2}\n\n{"id": "x", "messages": [{"role": "user"}]}\n'
    )
    first, second = read_tasks(path)
    assert first == Task("1", ({"role": "system", "content": "s"}, {"role": "user", "content": "a"}), "4", {"level": 2})
    assert second == Task("x", ({"role": "user"},))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is not a JSON object"),
        ("{}", "line 2: a task has one of prompt"),
        ('{"prompt": "a", "messages": []}', "line 2: a task has one of prompt"),
        ('{"prompt": 3}', "line 2: prompt must be text, or a list of objects"),
        ('{"prompt": "a", "system": 3}', "line 2: system must be text"),
        ('{"messages": [{"role": "user"}], "system": "s"}', "line 2: system goes with a prompt that is text"),
        ('{"messages": [{"content": "a"}]}', "line 2: messages must be text, or a list of objects with role"),
        ('{"prompt": "a", "answer": []}', "line 2: answer must be text or a number"),
        ('{"prompt": " "}', r"line 2: prompt is blank\.(.|\n)*Leave the row out"),
        (
            '{"messages": [{"role": "human", "content": "a"}]}',
            "line 2: a message has the role 'human', which chat templates leave",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "line 2: the content of a message must be text, not",
        ),
        ('{"messages": [{"role": "user", "content": 3}]}', "line 2: the content of a message must be text, not 3"),
        ('{"id": "1", "prompt": "a"}', r"two tasks have the id '1'\.(.|\n)*An id names one task: number them\."),
    ],
)
def test_a_line_that_is_no_task_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"prompt": "first"}}\n{line}\n')
    with pytest.raises(DataError, match=message):
        read_tasks(path)


def test_parts_of_a_message_that_are_text_are_one_text(tmp_path: Path) -> None:
    """Of multimodal data sets: a template would write the list itself into the prompt."""
    parts = [{"type": "text", "text": "2 + 2"}, {"type": "text", "text": " = ?"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": parts}]}))
    [task] = read_tasks(tmp_path / "a.jsonl")
    assert task.messages == ({"role": "user", "content": "2 + 2 = ?"},)


def test_no_task_changes_its_split_when_others_are_added() -> None:
    tasks = [Task(str(number), ()) for number in range(2000)]
    few, many = split_tasks(tasks[:1000], 0.1), split_tasks(tasks, 0.1)
    assert {task.id for task in few["test"]} <= {task.id for task in many["test"]}
    assert 60 < len(few["test"]) < 140
    assert len(few["train"]) + len(few["test"]) == 1000
