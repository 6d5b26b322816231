"""Rows of files: JSONL, JSON, CSV, TSV, parquet and arrow. A path is a file, a folder of shards, or a pattern such as data/*.parquet."""

from __future__ import annotations

import bz2
import codecs
import csv
import difflib
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from atropos_core.errors import DataError

Row = Mapping[str, Any]

ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSED = {
    b"\x1f\x8b": (".gz", gzip.decompress),
    b"BZh": (".bz2", bz2.decompress),
    b"\xfd7zXZ\x00": (".xz", lzma.decompress),
}
BOMS = (  # the longer ones first: UTF-32's begins as UTF-16's
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
NOT_ROWS = (  # what a file may be whose name promises rows: its first bytes, its kind, the remedy
    (b"PK\x03\x04", "a zip archive, or an Excel workbook", "Unpack it, or save the sheet as CSV in UTF-8."),
    (b"\xd0\xcf\x11\xe0", "an Excel workbook", "Save the sheet as CSV in UTF-8."),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "Unpack it: zstd -d FILE"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the data", "Fetch the data: git lfs pull"),
    (b"<!doctype", "a web page", "Download the file itself."),
    (b"<html", "a web page", "Download the file itself."),
)
SPLITS = frozenset({"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "heldout"})
OF_DATASETS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
CHECKED_FILES, CHECKED_BYTES = 100, 1 << 20  # that `check_files` reads at most, the bytes of each file
MOST_ENTRIES = 10_000  # of a folder that are looked at
DELIMITERS = ",;\t|"
UTF8 = "Save it as UTF-8. For a file from Windows: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
BY_ROWS = 'Write one row a line: {"prompt": "What is 2 + 2?", "answer": "4"}. The kinds of files: ' + ", ".join(ENDINGS)
_SPACE = re.compile(r"[\s\ufeff]*")


def value_at(row: Row, column: str) -> Any:
    """Return the value of a column. `reward_model.ground_truth` is looked up in the table `reward_model`. None if it is missing."""
    value: Any = row
    while column and isinstance(value, Mapping):
        if column in value:
            return value[column]
        first, _, column = column.partition(".")
        value = value.get(first)
    return None


def columns_in(row: Row) -> list[str]:
    """Return the names that `value_at` accepts for this row, down to values that are not tables."""
    found = []
    for name, value in row.items():
        within = isinstance(value, Mapping) and bool(value)
        found += [f"{name}.{one}" for one in columns_in(value)] if within else [name]
    return found


def read_rows(path: Path, prompt: str = "prompt") -> Iterator[tuple[str, Row]]:
    """Yield (position in the file, values) of each row. NaN is read as None. `prompt`: a JSON object with this column is a row.
    Raises DataError."""
    for file in files_of(path):
        try:
            yield from _rows(file, prompt)
        except OSError as error:
            raise _unreadable(file, error) from error


def check_files(path: Path) -> None:
    """Raise DataError if the files that a path means are missing, cannot be read, have nothing in them, or begin with something
    other than rows. Reads at most the beginning of each, so that it can come before anything that takes time."""
    is_empty = True
    for file in files_of(path)[:CHECKED_FILES]:
        try:
            with file.open("rb") as opened:
                head = opened.read(CHECKED_BYTES)
        except OSError as error:
            raise _unreadable(file, error) from error
        _refuse_others(file, head)
        is_packed = head.startswith(tuple(COMPRESSED))
        if not is_packed and not _is_columnar(file, head):
            _text(file, head, is_whole=len(head) < CHECKED_BYTES)
        is_empty = is_empty and not head.strip()
    if is_empty:
        raise DataError(f"{path} has no tasks: there is nothing in it.", remedy=BY_ROWS)


def _unreadable(path: Path, error: Exception) -> DataError:
    denied = isinstance(error, PermissionError)
    return DataError(
        f"the tasks of {path} cannot be read: {getattr(error, 'strerror', None) or error}.",
        remedy=f"Let this user read it, and enter its folders: chmod u+r {path}" if denied else "Name another file.",
    )


def files_of(path: Path) -> list[Path]:
    """Return the files that a path means, in the order of their names. Raises DataError."""
    try:
        if path.is_dir():
            return _in_folder(path)
        if path.is_file():
            return [path]
        if path.exists():
            raise DataError(f"{path} is not a regular file.", remedy="Write the rows to a file, and name that.")
        found = [] if not _is_pattern(path) else sorted(Path(one) for one in glob(str(path), recursive=True))
    except (OSError, ValueError) as error:  # a name with a NUL, or one that is too long
        raise _unreadable(path, error) from error
    if files := [one for one in found if one.is_file()]:
        return files
    if _is_pattern(path):
        raise DataError(f"no file matches {path}.", remedy="Quote the pattern, so that the shell leaves it as it is.")
    raise _missing(path)


def _missing(path: Path) -> DataError:
    start = "A relative path starts at the folder of the run file, or on the command line at the current directory."
    absent = [folder for folder in path.parents if not folder.exists()]
    if absent:
        return DataError(
            f"the file of tasks {path} does not exist, since the folder {absent[-1]} is missing.", remedy=start
        )
    try:
        near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1, cutoff=0.8)
    except OSError:  # a folder that may be entered and not listed
        near = []
    found = f"Did you mean {path.parent / near[0]}? " if near else ""
    return DataError(f"the file of tasks {path} does not exist.", remedy=f"{found}{start}")


def _is_pattern(path: Path) -> bool:
    return any(sign in str(path) for sign in "*?[")


def _in_folder(folder: Path) -> list[Path]:
    """Return the files of rows in a folder and below, except hidden ones. Raises DataError if it is unclear which ones are meant."""
    found: list[Path] = []
    entries = 0
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        entries += len(folders) + len(names)
        if entries > MOST_ENTRIES:
            raise DataError(
                f"the folder {folder} has more than {MOST_ENTRIES:,} entries.",
                remedy=f"Name the files by a pattern: '{folder}/train-*.parquet'",
            )
        kept = (name for name in names if not name.startswith((".", "_")) and name not in OF_DATASETS)
        found += [Path(place, name) for name in kept if _kind(Path(name)) in ENDINGS]
    found.sort()
    if not found:
        raise DataError(
            f"the folder {folder} has no file of rows.", remedy=f"The kinds of files: {', '.join(ENDINGS)}, also .gz"
        )
    if len(kinds := sorted({_kind(file) for file in found})) > 1:
        raise DataError(
            f"the folder {folder} has files of several kinds: {', '.join(kinds)}. They may be the same rows twice.",
            remedy=f"Name those that are meant: '{folder}/*{kinds[0]}'",
        )
    splits = {file: _splits(file.relative_to(folder)) for file in found}
    if len(set(splits.values())) > 1:
        named = sorted({word for words in splits.values() for word in words})
        raise DataError(
            f"the folder {folder} has files of several splits: {', '.join(named)} in only some of the names.",
            remedy=f"Name the files to train on, as '{folder}/train*{kinds[0]}', and name the others separately.",
        )
    return found


def _kind(file: Path) -> str:
    endings = [ending.lower() for ending in file.suffixes]
    while endings and endings[-1] in (".gz", ".bz2", ".xz"):
        endings.pop()
    return endings[-1] if endings else ""


def _splits(file: Path) -> frozenset[str]:
    return SPLITS & set(re.split(r"[^a-z]+", str(file).lower()))


def _rows(path: Path, prompt: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of one file. Its format follows from its suffix and its first bytes."""
    with path.open("rb") as file:
        head = file.read(64)
    kind = _kind(path)
    data: bytes | None = None
    if packed := next((by for magic, by in COMPRESSED.items() if head.startswith(magic)), None):
        data = _unpacked(path, *packed)
        head = data[:64]
    _refuse_others(path, head)
    if _is_columnar(path, head):
        yield from _columnar(path, data, is_parquet=kind == ".parquet" or head.startswith(b"PAR1"))
        return
    text = _text(path, path.read_bytes() if data is None else data)
    if kind in (".csv", ".tsv"):
        yield from _csv(path, text, "\t" if kind == ".tsv" else "")
    else:
        yield from _json(path, text, prompt)


def _refuse_others(path: Path, head: bytes) -> None:
    for magic, what, remedy in NOT_ROWS:
        if head.lower().startswith(magic.lower()):
            raise DataError(f"{path} is {what}.", remedy=remedy)


def _is_columnar(path: Path, head: bytes) -> bool:
    return _kind(path) in (".parquet", ".arrow") or head.startswith((b"PAR1", b"ARROW1"))


def _unpacked(path: Path, ending: str, unpack: Any) -> bytes:
    try:
        return bytes(unpack(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{path} cannot be unpacked as {ending}: {error}. It is cut off or damaged.",
            remedy="Write or download it again.",
        ) from error


def _text(path: Path, data: bytes, *, is_whole: bool = True) -> str:
    """Return the text. The beginning of a file, not `is_whole`, may end within a character. Raises DataError."""
    encoding = next((name for bom, name in BOMS if data.startswith(bom)), "utf-8-sig")
    try:
        text = data.decode(encoding) if is_whole else codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line} is not text in {encoding.removesuffix('-sig').upper()}: {error.reason} at byte {error.start}.",
            remedy=UTF8,
        ) from error
    if (at := text.find("\0")) >= 0:
        raise DataError(
            f"{path}, line {text.count(chr(10), 0, at) + 1} has a NUL in it: the file is damaged, or UTF-16 without its mark.",
            remedy="Save it again, as UTF-8.",
        )
    return text


# -- JSON


def _json(path: Path, text: str, prompt: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a JSON text: objects one after another, on any lines, or a single value that holds all rows."""
    decode = json.JSONDecoder().raw_decode
    at, counted, line = _after_space(text, 0), 0, 1
    begin = at
    while at < len(text):
        line += text.count("\n", counted, at)
        counted = at
        where = f"{path}, line {line}"
        try:
            value, end = decode(text, at)
        except json.JSONDecodeError as error:
            named = path if text[at] == "[" else where
            raise DataError(f"{named} is not JSON: {error}.", remedy=BY_ROWS) from error
        except (ValueError, RecursionError) as error:  # digits or lists beyond Python's own bounds
            raise DataError(f"{where} cannot be read as JSON: {str(error).partition(';')[0]}.") from error
        end = _after_space(text, end)
        if at == begin and end == len(text):
            yield from _of_one_value(path, value, where, prompt)
            return
        yield _checked(value, where)
        at = end


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _of_one_value(path: Path, value: Any, where: str, prompt: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file that is one JSON value: a list of rows, an object with such a list, or a single row."""
    if isinstance(value, dict):
        given = value.get("messages") if value_at(value, prompt) is None else value_at(value, prompt)
        lists = {name: one for name, one in value.items() if _are_objects(one) and "role" not in one[0]}
        if given is None and len(lists) > 1:
            raise DataError(
                f"{path} has several lists of rows: {', '.join(lists)}.",
                remedy="Write each list to a separate file, one row a line.",
            )
        if isinstance(given, dict) or (isinstance(given, list) and not _are_objects(given)):
            raise DataError(
                f"{path} has columns, each with the values of all rows.",
                remedy='Write it by rows; in pandas: df.to_json(path, orient="records", lines=True)',
            )
        if given is None and lists:
            [value] = lists.values()
    if not isinstance(value, list):
        yield _checked(value, where)
        return
    for number, row in enumerate(value, 1):
        yield _checked(row, f"{path}, row {number}")


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _checked(row: Any, where: str) -> tuple[str, Row]:
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object, but {json.dumps(row)[:80]}.", remedy=BY_ROWS)
    return where, plain_row(row)


def plain_row(row: Row) -> Row:
    """Return the row with None for NaN, and with text for values that JSON lacks, such as dates."""
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, int | bytes):
        return value
    if isinstance(value, float):
        return None if value != value else value
    return str(value)


# -- tables


def _csv(path: Path, text: str, delimiter: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(2**31 - 1)  # of the whole process; as it comes, a prompt ends at 131,072 characters
    skipped = 0
    if said := re.match(r"sep=(.)\r?\n", text):  # Excel's own first line
        delimiter, skipped, text = said[1], 1, text[said.end() :]
    delimiter = delimiter or _delimiter(text)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    last = 0
    try:
        for values in rows:
            last = rows.line_num + skipped
            if not values:
                continue
            where = f"{path}, line {last}"
            if not names:
                names = [name.strip() for name in values]
                _refuse_duplicate_columns(names, where)
                continue
            if len(values) != len(names):
                raise DataError(
                    f"{where} has {len(values)} values, and the first line has {len(names)} names.",
                    remedy=f"Put values that have {delimiter!r} or a line break in them between double quotes.",
                )
            yield where, {name: value for name, value in zip(names, values, strict=True) if name}
    except csv.Error as error:
        raise DataError(
            f"{path} is not CSV, after line {last}: {error}.",
            remedy="Close each quoted value, and write a double quote in it twice.",
        ) from error


def _delimiter(text: str) -> str:
    """Return the delimiter that splits the first line into the most names; the comma in a tie."""

    def names(delimiter: str) -> int:
        try:
            return len(next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), ()))
        except csv.Error:
            return 0

    return max(DELIMITERS, key=names)


def _columnar(path: Path, data: bytes | None, *, is_parquet: bool) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a parquet file, or of an Arrow file or stream as `datasets` saves it."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path}: parquet and arrow are read by pyarrow, which is not installed.", remedy="pip install pyarrow"
        ) from error
    source = pyarrow.BufferReader(data) if data is not None else pyarrow.OSFile(str(path))
    number = 0
    try:
        with source:
            if is_parquet:
                file = pyarrow.parquet.ParquetFile(source)
                names, batches = file.schema_arrow.names, file.iter_batches()
            else:
                file = _arrow(pyarrow, source)
                names, batches = file.schema.names, file
            _refuse_duplicate_columns(names, str(path))
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", plain_row(row)
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        kind = "parquet" if is_parquet else "arrow"
        raise DataError(
            f"{path} cannot be read as {kind}, after row {number}: {str(error).splitlines()[0]}",
            remedy="Write or download it again.",
        ) from error


def _arrow(pyarrow: Any, source: Any) -> Any:
    """Return a stream, as `save_to_disk` writes it, or the batches of a file."""
    start = source.read(6)
    source.seek(0)
    if start != b"ARROW1":
        return pyarrow.ipc.open_stream(source)
    file = pyarrow.ipc.open_file(source)
    return pyarrow.RecordBatchReader.from_batches(
        file.schema, (file.get_batch(at) for at in range(file.num_record_batches))
    )


def _refuse_duplicate_columns(names: Sequence[str], where: str) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1 and name]:
        raise DataError(f"{where} has two columns {twice[0]!r}.", remedy="Rename one of them.")
