"""A file of rows, as JSON lines or parquet, that appears complete or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_core.errors import ConfigError, FitError, RunDirectoryError
from atropos_core.storage.atomic import json_bytes, refuse_existing
from atropos_records.forms import Column, Row

ROW_GROUP_BYTES = 16 << 20  # of rows that wait in memory, about
ROW_GROUP_ROWS = 10_000


def new_file(path: Path, columns: Mapping[str, Column]) -> RowFile:
    """Make a file. Raises ConfigError for an unknown suffix, RunDirectoryError if it exists or cannot be written."""
    kinds: dict[str, type[RowFile]] = {".jsonl": JsonLines, ".parquet": Parquet}
    if path.suffix not in kinds:
        raise ConfigError(
            f"{path}: the end of the name must say the format.", remedy="Name it NAME.jsonl or NAME.parquet."
        )
    refuse_existing(path)
    try:
        return kinds[path.suffix](path, columns)
    except OSError as error:
        raise _unwritable(path, error) from error


class RowFile:
    """`finish` moves it to its name, `discard` leaves nothing behind."""

    def __init__(self, path: Path, columns: Mapping[str, Column]) -> None:
        """Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._columns = columns
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._file = self._partial.open("wb")

    def write(self, row: Row) -> None:
        try:
            self._write(row)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def finish(self) -> None:
        try:
            self._flush()
            self._file.close()
            self._partial.replace(self.path)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def discard(self) -> None:
        """Remove the unfinished file. Does nothing after `finish`."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _write(self, row: Row) -> None:
        raise NotImplementedError

    def _flush(self) -> None: ...


class JsonLines(RowFile):
    def _write(self, row: Row) -> None:
        self._file.write(json_bytes(json.dumps(row, ensure_ascii=False) + "\n"))


class Parquet(RowFile):
    """Read by pandas, polars and `datasets`, which returns JSON columns as objects (5.0 and later)."""

    def __init__(self, path: Path, columns: Mapping[str, Column]) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise FitError(
                f"{path}: parquet is written by pyarrow, which is not installed.",
                remedy="pip install 'atropos-records[export]'; a name that ends in .jsonl needs nothing.",
            ) from error
        super().__init__(path, columns)
        self._arrow = pyarrow
        types = {
            "string": pyarrow.string(), "int64": pyarrow.int64(), "float64": pyarrow.float64(), "bool": pyarrow.bool_(),
            "json": pyarrow.json_(), "list[json]": pyarrow.list_(pyarrow.json_()), "list[int32]": pyarrow.list_(pyarrow.int32()),
            "list[int64]": pyarrow.list_(pyarrow.int64()), "list[float64]": pyarrow.list_(pyarrow.float64()),
            "list[bool]": pyarrow.list_(pyarrow.bool_()), "list[float]": pyarrow.list_(pyarrow.float32()),
        }  # fmt: skip
        self._stored = {
            "json": pyarrow.string(),
            "list[json]": pyarrow.list_(pyarrow.string()),
        }  # before it is called JSON
        self._schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
        self._writer = pyarrow.parquet.ParquetWriter(self._file, self._schema, compression="zstd")
        self._rows: list[Row] = []
        self._bytes = 0

    def _write(self, row: Row) -> None:
        plain = {name: _as_text(row[name], kind) for name, kind in self._columns.items()}
        self._rows.append(plain)
        self._bytes += sum(_size(value) for value in plain.values())
        if self._bytes >= ROW_GROUP_BYTES or len(self._rows) >= ROW_GROUP_ROWS:
            self._flush_rows()

    def _flush(self) -> None:
        self._flush_rows()
        self._writer.close()

    def discard(self) -> None:
        self._writer.close()
        super().discard()

    def _flush_rows(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        if not rows:
            return
        columns = []
        for (name, kind), field in zip(self._columns.items(), self._schema, strict=True):
            made = self._arrow.array(
                [row[name] for row in rows], type=self._stored.get(kind, field.type), from_pandas=True
            )
            columns.append(made if made.type == field.type else made.cast(field.type))
        self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))


def _as_text(value: Any, kind: Column) -> Any:
    if value is None or "json" not in kind:
        return value
    if kind == "list[json]":
        return [_json_text(one) for one in value]
    return _json_text(value)


def _json_text(value: Any) -> str:
    return json_bytes(json.dumps(value, ensure_ascii=False)).decode()


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(len, value))
    return int(getattr(value, "nbytes", 8)) if not isinstance(value, str) else len(value)


def _unwritable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} cannot be written: {error.strerror}.", remedy="Free some space, or name another place."
    )
