"""Options of the sink `csv`."""

from __future__ import annotations

from pathlib import PurePath

from pydantic import Field, field_validator

from atropos_core.plugins.provider import Options


class CsvOptions(Options):
    file: str = Field("metrics.csv", description="file name in the run directory")

    @field_validator("file")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if PurePath(value).name != value or value in ("", ".", ".."):
            raise ValueError(
                f"file = {value!r} is not a file name: the table is in the run directory, so leave folders out"
            )
        return value
