"""An environment's file: its module, its class, its configuration."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

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
    kind = _own_config(cls, type(config))
    if unknown := sorted(changes.keys() - kind.model_fields.keys()):
        raise ConfigError(
            f"config.{unknown[0]} is no field of {kind.__name__}.",
            remedy=f"It has: {', '.join(sorted(kind.model_fields))}",
        )
    try:
        said = type(config).model_fields if kind is type(config) else config.model_fields_set
        values = {name: getattr(config, name) for name in said}
        return kind.model_validate(values | {"use_wandb": False} | dict(changes)), servers
    except ValidationError as error:
        raise ConfigError(f"config of {cls.__name__}: {error}") from error


def _own_config(cls: Any, given: Any) -> Any:
    """The class of its configuration: what config_init gave, or what derives from that and stands in __init__ alone."""
    try:
        said = get_type_hints(cls.__init__).get("config")
    except NameError:  # of another annotation
        return given
    return said if inspect.isclass(said) and issubclass(said, given) else given


def missing(who: str, error: ModuleNotFoundError) -> ConfigError | PluginError:
    """What to say of a module that a file imports: its package is not installed, or is another version of it."""
    name = error.name or ""
    top = name.partition(".")[0]
    if top in ("", "atroposlib"):
        return PluginError(f"{who} could not be imported: {error}")
    if top != name and top in sys.modules:
        return ConfigError(
            f"{who} imports {name!r}, which the {top!r} that is installed does not have.",
            remedy=f"Install the version of {top} that the file was written for.",
        )
    return ConfigError(f"{who} imports {name!r}, which is not installed.", remedy=f"pip install {top}")


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
        raise missing(str(file), error) from error
    except ImportError as error:
        raise PluginError(f"{file} could not be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"{file} could not be imported: {type(error).__name__}: {error}") from error
