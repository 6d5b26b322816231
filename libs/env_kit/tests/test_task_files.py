"""Tasks in files: what is read from each format, and the error for an invalid row."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from atropos_core.errors import DataError
from atropos_core.types import Task
from atropos_env_kit.row_files import CHECKED_BYTES, check_files, read_rows, value_at
from atropos_env_kit.task_files import Columns, read_tasks, split_tasks

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
        ("none.jsonl", None, "the file of tasks .*none.jsonl does not exist"),
        ("none.parquet", None, "the file of tasks .*none.parquet does not exist"),
        ("a.jsonl", b"\xff\xfe{", "a.jsonl, line 1 is not text in UTF-16: truncated data at byte 2"),
        (
            "a.jsonl",
            b'{"prompt": "a"}\n{"prompt": "\xe9"}',
            "a.jsonl, line 2 is not text in UTF-8.*at byte 28(.|\n)*iconv -f WINDOWS",
        ),
        ("a.csv", b"prompt,answer\n1 + 1,2\n1\x00,2\n", "a.csv, line 3 has a NUL in it"),
        (
            "a.jsonl",
            '{"prompt": "a"}'.encode("utf-16-le"),
            "a.jsonl, line 1 has a NUL in it: .* UTF-16 without its mark",
        ),
        ("a.json", b"[1]", "a.json, row 1 is not a JSON object, but 1"),
        ("a.json", b"[{]", "a.json is not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1 cannot be read as JSON: maximum recursion"),
        ("a.jsonl", b'{"answer": ' + b"9" * 5000 + b"}", "a.jsonl, line 1 cannot be read as JSON: Exceeds the limit"),
        ("a.csv", b"prompt,answer\na\n", "a.csv, line 2 has 1 values, and the first line has 2 names"),
        ("a.csv", b"prompt,answer\na,b,c\n", "a.csv, line 2 has 3 values, and the first line has 2 names"),
        ("a.csv", b"prompt,answer,answer\na,b,c\n", "a.csv, line 1 has two columns 'answer'"),
        ("a.csv", b'prompt,answer\n"a,b\n', "a.csv is not CSV, after line 1"),
        ("a.csv", b"prompt,answer\n", "a.csv has no tasks"),
        ("a.parquet", b"PAR1 and no more", "a.parquet cannot be read as parquet"),
        ("a.parquet", b"", "a.parquet cannot be read as parquet"),
        ("a.arrow", b"\xff\xff\xff\xff and no more", "a.arrow cannot be read as arrow"),
        ("a.jsonl", b"", "a.jsonl has no tasks"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt": "a"}\n' * 100, mtime=0)[:-20],
            "a.jsonl.gz cannot be unpacked as .gz: .* cut off or damaged",
        ),
        ("a.csv", b"PK\x03\x04", "a.csv is a zip archive, or an Excel workbook(.|\n)*save the sheet as CSV"),
        (
            "a.jsonl",
            b"version https://git-lfs.github.com/spec/v1\noid",
            "a.jsonl is a pointer of Git LFS(.|\n)*git lfs pull",
        ),
        (
            "a.json",
            b'{"train": [{"prompt": "a"}], "test": [{"prompt": "b"}]}',
            "a.json has several lists of rows: train, test",
        ),
        ("a.json", b'{"prompt": {"0": "a"}, "answer": {"0": "b"}}', "a.json has columns, (.|\n)*orient="),
        ("a.json", b'{"prompt": ["a"], "answer": ["b"]}', "a.json has columns, (.|\n)*orient="),
        ("a-*.jsonl", None, "no file matches .*a-\\*.jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_tasks(tmp_path / name)


ROW = {"prompt": "1 + 1?", "answer": "2"}
LINE = json.dumps(ROW).encode()
CHAT = [{"role": "user", "content": 'What is 38 + 7?\nIt\'s "easy".'}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(LINE, mtime=0)),
        ("a.jsonl.xz", lzma.compress(LINE)),
        ("a.csv.bz2", bz2.compress(b"prompt,answer\n1 + 1?,2\n")),
        ("packed-by-its-bytes.jsonl", gzip.compress(LINE, mtime=0)),
        ("a.tsv", b"prompt\tanswer\n1 + 1?\t2\n"),
        ("a.CSV", b"prompt;answer\r\n1 + 1?;2\r\n"),
        ("quoted.csv", b'"prompt";"answer"\n"1 + 1?";"2"\n'),
        ("excel.csv", "sep=;\nprompt;answer\n1 + 1?;2\n".encode("utf-16")),
        ("index.csv", b",prompt,answer\n0,1 + 1?,2\n"),
        ("data.json", b'{"version": 1, "data": [' + LINE + b"]}"),
        ("one.json", json.dumps(ROW, indent=1).encode()),
        ("pretty.jsonl", json.dumps(ROW, indent=1).encode() + b"\n"),
        ("list.jsonl", b"[" + LINE + b"]"),
        ("utf16.jsonl", LINE.decode().encode("utf-16")),
        ("bom.csv", b"\xef\xbb\xbfprompt,answer\n1 + 1?,2\n"),
        ("no-ending", LINE),
    ],
)
def test_a_file_is_read_as_what_it_is(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert read_tasks(tmp_path / name) == [Task("1", ({"role": "user", "content": "1 + 1?"},), "2")]


def test_a_csv_cell_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"prompt\n{'a' * 200_000}\n")
    [task] = read_tasks(tmp_path / "a.csv")
    assert len(task.messages[0]["content"]) == 200_000


def test_a_pattern_and_a_folder_are_their_files_in_order(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        (tmp_path / f"train-{number}.jsonl").write_text(json.dumps({"prompt": str(number)}) + "\n")
    for other in ("README.md", ".hidden.jsonl", "state.json"):
        (tmp_path / other).write_text("{")
    (tmp_path / "folder-.jsonl").mkdir()
    for path in (tmp_path, tmp_path / "train-*.jsonl", tmp_path / "**" / "*-[0-9].jsonl"):
        assert [task.messages[0]["content"] for task in read_tasks(path)] == ["0", "1", "2"]
    (tmp_path / "linked").symlink_to(tmp_path)
    assert [task.id for task in read_tasks(tmp_path / "linked")] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["notes.txt"], "has no file of rows"),
        (["a.jsonl", "a.parquet"], r"has files of several kinds: .jsonl, .parquet(.|\n)*\*.jsonl"),
        (["train-0.jsonl", "test-0.jsonl"], "has files of several splits: test, train"),
        (["rows.jsonl", "deeper/validation.jsonl"], "has files of several splits: validation in only some"),
    ],
)
def test_a_folder_of_files_that_do_not_belong_together_is_refused(
    tmp_path: Path, names: list[str], message: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path))


def test_what_is_not_a_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        with pytest.raises(DataError, match="is not a regular file"):
            list(read_rows(path))
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        list(read_rows(tmp_path / ("a" * 300)))


def test_what_datasets_saves_is_read_and_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([ROW, ROW]).save_to_disk(tmp_path / "saved")
    assert [row for _, row in read_rows(tmp_path / "saved")] == [ROW, ROW]
    table = arrow.Table.from_arrays([arrow.array(["a"]), arrow.array(["b"])], names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="twice.parquet has two columns 'prompt'"):
        list(read_rows(tmp_path / "twice.parquet"))


def test_nan_is_no_value(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"id": NaN, "prompt": "a", "answer": NaN, "reward_model": {"ground_truth": NaN}}'
    )
    [task] = read_tasks(tmp_path / "a.jsonl")
    assert (task.id, task.answer, task.data) == ("1", None, {"reward_model": {"ground_truth": None}})


@pytest.mark.parametrize(
    "cell",
    [json.dumps(CHAT), str(CHAT), json.dumps(CHAT[0]), json.dumps(json.dumps(CHAT)), f" {CHAT}\n", str(tuple(CHAT))],
    ids=["json", "repr", "one", "twice", "spaces", "tuple"],
)
@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_messages_in_a_cell_are_messages(tmp_path: Path, cell: str, column: str) -> None:
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[column, "answer"], [cell, "45"]])
    [task] = read_tasks(tmp_path / "a.csv")
    assert task.messages == tuple(CHAT)


@pytest.mark.parametrize("write", [json.dumps, str])
def test_a_message_in_a_cell_may_have_calls_in_place_of_content(tmp_path: Path, write: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    chat = [CHAT[0], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": write(chat)}))
    assert read_tasks(tmp_path / "a.jsonl")[0].messages == tuple(chat)


@pytest.mark.parametrize(
    "text",
    [
        "[3, 1, 2]",
        json.dumps({"question": "Who spoke last?", "history": CHAT}),
        "(from 'user' to 'gpt', which value has the role?)",
        "{role: user, content: what?}",
        '{"role": "admin"} is which role?',
        "[1, 2] sorted?",
        '[{"role": "admin"}]',
        '{"a": 1}',
        "a\\d [",
        '"quoted"?',
    ],
)
def test_a_text_that_only_looks_like_data_is_a_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": text}))
    [task] = read_tasks(tmp_path / "a.jsonl")
    assert task.messages == ({"role": "user", "content": text},)


@pytest.mark.parametrize(
    "cell",
    [
        json.dumps(CHAT)[:-9],
        "[{'content': 'a', 'role': 'user'}\n {'content': 'b', 'role': 'assistant'}]",  # as numpy prints an array
        "array([{'role': 'user', 'content': 'a'}], dtype=object)",
        "".join(json.dumps(message) + "\n" for message in [*CHAT, *CHAT]),
        json.dumps([json.dumps(message) for message in CHAT]),
        json.dumps({"messages": CHAT}),
        json.dumps([{"from": "human", "value": "2 + 2?"}]),
        json.dumps(CHAT).replace('"', '""'),
        repr(json.dumps(CHAT).encode()),
        "[OrderedDict([('role', 'user'), ('content', 'a')])]",
        "[ChatMessage(role='user', content='a')]",
    ],
)
def test_messages_that_cannot_be_read_are_refused_by_row(tmp_path: Path, cell: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": cell}))
    with pytest.raises(DataError, match=r"line 2: prompt is the text of messages(.|\n)*json.dumps"):
        read_tasks(tmp_path / "a.jsonl")


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "cell",
    [
        *([ADD], json.dumps([ADD]), str([ADD]), [ADD["function"]], json.dumps([ADD | {"strict": None}])),
        *(ADD, json.dumps(ADD), ADD["function"], [json.dumps(ADD)], json.dumps([json.dumps(ADD)])),
    ],
)
def test_tools_are_read_in_whatever_form_they_have(tmp_path: Path, cell: Any) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "tools": cell}))
    assert read_tasks(tmp_path / "a.jsonl")[0].data["tools"] == [ADD]


def test_a_column_of_other_tools_is_left_and_broken_ones_are_refused(tmp_path: Path) -> None:
    for kept in ("hammer, saw", ["hammer"], "", None):
        (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "tools": kept}))
        assert read_tasks(tmp_path / "a.jsonl")[0].data["tools"] == kept
    for broken in (
        *([{"type": "function"}], '[{"type": "function", "function": {"na', f"array([{ADD}], dtype=object)"),
        *(f"{json.dumps(ADD)}\n{json.dumps(ADD)}", ["{" + json.dumps(ADD)], [ADD, "add"]),
    ):
        (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "tools": broken}))
        with pytest.raises(DataError, match="line 1: tools must be a list of functions"):
            read_tasks(tmp_path / "a.jsonl")


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d"}')
    with pytest.raises(DataError, match="line 1: a message has half of a surrogate pair"):
        read_tasks(tmp_path / "a.jsonl")


def test_tasks_are_read_with_their_own_fields(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"prompt": "a", "system": "s", "answer": 4, "level": 2}\n\n{"id": "x", "messages": [{"role": "user", "content": "b"}]}\n'
    )
    first, second = read_tasks(path)
    assert first == Task("1", ({"role": "system", "content": "s"}, {"role": "user", "content": "a"}), "4", {"level": 2})
    assert second == Task("x", ({"role": "user", "content": "b"},))


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
        ('{"messages": [{"role": "user", "content": null}]}', "line 2: a message of the role 'user' has no content"),
        ('{"messages": [{"role": "user"}]}', "line 2: a message of the role 'user' has no content"),
        ('{"messages": [{"role": "user", "content": 3}]}', "line 2: the content of a message must be text, not 3"),
        (
            '{"id": "1", "prompt": "a"}',
            r"two tasks have the id '1'\. They are .*, line 1 and .*, line 2\.(.|\n)*An id names one task: number them\.",
        ),
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


def test_a_check_of_files_reads_only_their_beginning(tmp_path: Path) -> None:
    """A character that is cut at its end is not an error, and neither is what comes after it."""
    beginning = b"\xc3\xa4" * (CHECKED_BYTES // 2 - 1) + b"a"
    (tmp_path / "a.jsonl").write_bytes(beginning + b"\xc3\xa4\xe9")
    check_files(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"\xe9" + beginning)
    with pytest.raises(DataError, match="a.jsonl, line 1 is not text in UTF-8: .* at byte 0"):
        check_files(tmp_path / "a.jsonl")
    for name, content in (("b.jsonl.gz", gzip.compress(b"{}")), ("b.parquet", b"PAR1\xe9")):
        (tmp_path / name).write_bytes(content)
        check_files(tmp_path / name)


def test_a_missing_file_comes_with_the_one_that_was_meant_or_the_folder_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"Did you mean .*/train\.jsonl\?"):
        check_files(tmp_path / "tran.jsonl")
    with pytest.raises(DataError, match=r"c\.jsonl does not exist, since the folder .*/a is missing"):
        check_files(tmp_path / "a/b/c.jsonl")


def test_a_file_that_this_user_may_not_read_is_named_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}")
    file.chmod(0)
    own = os.geteuid()
    if own == 0:  # root reads everything
        os.seteuid(65534)
    try:
        with pytest.raises(DataError, match=r"(?s)a\.jsonl cannot be read: Permission denied.*chmod u\+r") as raised:
            check_files(file)
    finally:
        os.seteuid(own)
    assert raised.value.remedy
