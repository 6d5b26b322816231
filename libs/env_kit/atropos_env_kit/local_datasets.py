"""Let `load_dataset` in environments of other frameworks read local files in place of data sets of the hub."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atropos_core.errors import ConfigError

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def serve_datasets(given: Mapping[str, str]) -> None:
    """Make `load_dataset` of the package `datasets` read these files for those names. A name matches itself and its last part; "*"
    matches any other. Raises ConfigError for a missing path, and if the package is not installed."""
    if not given:
        return
    try:
        datasets: Any = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise ConfigError(
            "the option `datasets` needs the package of that name.", remedy="pip install datasets"
        ) from None
    places = {name: Path(source).expanduser().resolve() for name, source in given.items()}
    for name, source in places.items():
        if not source.exists():
            raise ConfigError(f"datasets: {name!r} should be at {source}, and there is nothing.")
    load: Callable[..., Any] = datasets.load_dataset

    def from_files(path: Any, name: Any = None, *args: Any, **keywords: Any) -> Any:
        of_last_part = next((at for key, at in places.items() if key.split("/")[-1] == path), None)
        source = places.get(str(path)) or of_last_part or places.get("*")
        if source is None:
            return load(path, name, *args, **keywords)
        files = _files(source / str(name) if name and (source / str(name)).is_dir() else source)
        kind = READERS[Path(next(iter(files.values()))).suffix]
        kept = {key: keywords[key] for key in ("split", "streaming") if key in keywords}
        return load(kind, data_files=files, **kept)

    datasets.load_dataset = from_files


def _files(folder: Path) -> dict[str, str]:
    """Return files by split: in a folder, each file by the start of its name; a single file is `train`."""
    if folder.is_file():
        return {"train": str(folder)}
    found = {path.stem.split("-")[0]: str(path) for path in sorted(folder.iterdir()) if path.suffix in READERS}
    if not found:
        raise ConfigError(f"datasets: {folder} has no file that ends in {', '.join(READERS)}.")
    return found
