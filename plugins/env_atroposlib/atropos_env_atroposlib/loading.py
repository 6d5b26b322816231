"""An environment's file: its module, its class, its configuration."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from atropos_core.errors import ConfigError, PluginError


def load_class(reference: str) -> Any:
    """Of `path.py` or `path.py:Class`. Raises ConfigError for a file or class that is not there, or a package that it lacks;
    PluginError for what importing it raises."""
    path, _, name = reference.rpartition(":") if not reference.endswith(".py") else (reference, "", "")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no file {file}.", remedy="Name the environment's file: --env atroposlib:path.py")
    module = _import(file)
    if name:
        found: Any = getattr(module, name, None)
        if not _is_environment(found):
            raise ConfigError(f"{file} has no environment {name!r}, a class derived from BaseEnv.")
        return found
    own = [one for one in vars(module).values() if _is_environment(one) and one.__module__ == module.__name__]
    leaves = [one for one in own if not any(one in other.__mro__[1:] for other in own)]
    if len(leaves) != 1:
        names = ", ".join(sorted(one.__name__ for one in leaves)) or "none"
        raise ConfigError(
            f"{file} has {len(leaves)} environments ({names}), and one is run.", remedy=f"Say which: {file}:Class"
        )
    return leaves[0]


def configured(cls: Any, changes: Mapping[str, Any]) -> tuple[Any, Any]:
    """What its config_init says, with `changes` over its own fields: its configuration, and its servers'. Raises ConfigError."""
    try:
        config, servers = cls.config_init()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{cls.__name__}.config_init() gave no pair of configurations: {type(error).__name__}: {error}"
        ) from error
    fields = type(config).model_fields
    if unknown := sorted(changes.keys() - fields.keys()):
        raise ConfigError(
            f"config.{unknown[0]} is no field of {type(config).__name__}.",
            remedy=f"It has: {', '.join(sorted(fields))}",
        )
    try:
        values = {name: getattr(config, name) for name in fields} | {"use_wandb": False} | dict(changes)
        return type(config).model_validate(values), servers
    except ValidationError as error:
        raise ConfigError(f"config of {cls.__name__}: {error}") from error


def _is_environment(value: Any) -> bool:
    from atropos_env_atroposlib.standins.base import BaseEnv

    return inspect.isclass(value) and issubclass(value, BaseEnv)


def _import(file: Path) -> ModuleType:
    """By its own name, with its folder on the path; as a part of the packages around it where it says `from .`."""
    top, name = file.resolve().parent, file.stem
    if re.search(r"^\s*from \.", file.read_text(errors="replace"), re.MULTILINE):
        name, top = f"{top.name}.{name}", top.parent
        while (top / "__init__.py").is_file():
            name, top = f"{top.name}.{name}", top.parent
        folder = file.resolve().parent
        if not (folder / "__init__.py").is_file():  # a package without one, whose name a module in it may have too
            package = sys.modules[folder.name] = ModuleType(folder.name)
            package.__path__ = [str(folder)]
    around = [
        one.parent for one in file.resolve().parents if one.name == "environments"
    ]  # `from environments.x import`
    for folder in dict.fromkeys((file.resolve().parent, top, *around)):
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "atroposlib"):
            raise PluginError(f"{file} could not be imported: {error}") from error
        raise ConfigError(
            f"{file} imports {missing!r}, which is not installed.", remedy=f"pip install {missing}"
        ) from error
    except ImportError as error:
        raise PluginError(f"{file} could not be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"{file} could not be imported: {type(error).__name__}: {error}") from error
