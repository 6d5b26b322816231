"""Options that are paths: a relative one starts at the folder of its run file, or at the current directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class WrittenIn(str):
    """A string of a run file or flag that remembers the folder in which a relative path starts."""

    folder: Path

    def __new__(cls, text: str, folder: Path) -> WrittenIn:
        made = super().__new__(cls, text)
        made.folder = folder
        return made


def _from_its_folder(value: Any) -> Any:
    return value.folder / Path(value).expanduser() if isinstance(value, WrittenIn) else value


def absolute(path: Path) -> Path:
    return path.expanduser().resolve()


# An option that is a file or a folder. In a run file, a relative path starts at the folder of that file; elsewhere at the current
# directory. It is stored as an absolute path, because a resumed run may start elsewhere.
FROM_ITS_FOLDER = BeforeValidator(_from_its_folder)
AbsolutePath = Annotated[Path, FROM_ITS_FOLDER, AfterValidator(absolute)]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, WrittenIn) else value


def _has_path(annotation: Any) -> bool:
    """True if the annotation contains a path, or options that may have one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return FROM_ITS_FOLDER in getattr(annotation, "__metadata__", ()) or any(map(_has_path, get_args(annotation)))


def is_path(option: FieldInfo) -> bool:
    found = (option.metadata, *(getattr(one, "__metadata__", ()) for one in get_args(option.annotation)))
    return any(FROM_ITS_FOLDER in metadata for metadata in found)


def without_folders(values: Any, options: Mapping[str, FieldInfo]) -> Any:
    """Keep the folder only on strings that are paths; pass all others on as plain strings."""
    if not isinstance(values, dict):
        return values
    paths = {name for name, one in options.items() if FROM_ITS_FOLDER in one.metadata or _has_path(one.annotation)}
    return {name: value if name in paths else _plain(value) for name, value in values.items()}
