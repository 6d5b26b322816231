"""Options that are files or folders: where a relative one begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class WrittenIn(str):
    """A text of a run file or of a flag, which knows the folder that a relative path in it begins at."""

    folder: Path

    def __new__(cls, text: str, folder: Path) -> WrittenIn:
        made = super().__new__(cls, text)
        made.folder = folder
        return made


def _from_its_folder(value: Any) -> Any:
    return value.folder / Path(value).expanduser() if isinstance(value, WrittenIn) else value


def absolute(path: Path) -> Path:
    return path.expanduser().resolve()


# An option that is a file or a folder. In a run file a relative one begins at the folder of that file, elsewhere at the current
# directory; it is kept as an absolute one, since a resumed run may start elsewhere.
FROM_ITS_FOLDER = BeforeValidator(_from_its_folder)
AbsolutePath = Annotated[Path, FROM_ITS_FOLDER, AfterValidator(absolute)]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, WrittenIn) else value


def _has_path(annotation: Any) -> bool:
    """Whether a path is somewhere in it, or options that may have one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return FROM_ITS_FOLDER in getattr(annotation, "__metadata__", ()) or any(map(_has_path, get_args(annotation)))


def is_path(option: FieldInfo) -> bool:
    found = (option.metadata, *(getattr(one, "__metadata__", ()) for one in get_args(option.annotation)))
    return any(FROM_ITS_FOLDER in metadata for metadata in found)


def without_folders(values: Any, options: Mapping[str, FieldInfo]) -> Any:
    """Where a text was written is known to paths alone: what is passed on to others is a plain one."""
    if not isinstance(values, dict):
        return values
    paths = {name for name, one in options.items() if FROM_ITS_FOLDER in one.metadata or _has_path(one.annotation)}
    return {name: value if name in paths else _plain(value) for name, value in values.items()}
