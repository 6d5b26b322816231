"""Load an environment's file: its module, its class, its configuration."""

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
    """The class of `path.py` or `path.py:Class`. Raises ConfigError if the file, the class or a package is missing, PluginError
    if importing it raises."""
    path, _, name = reference.rpartition(":") if not reference.endswith(".py") else (reference, "", "")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"file {file} does not exist.", remedy="Name the environment's file: --env atroposlib:path.py"
        )
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
            f"{file} has {len(leaves)} environments ({names}), but one is run.", remedy=f"Say which: {file}:Class"
        )
    return leaves[0]


def configured(cls: Any, changes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Its configuration, with `changes` over config_init's own values, and its servers' configuration. Raises ConfigError."""
    try:
        config, servers = cls.config_init()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{cls.__name__}.config_init() gave no pair of configurations: {type(error).__name__}: {error}"
        ) from error
    kind = _own_config(cls, type(config))
    if unknown := sorted(changes.keys() - kind.model_fields.keys()):
        raise ConfigError(
            f"config.{unknown[0]} is not a field of {kind.__name__}.",
            remedy=f"It has: {', '.join(sorted(kind.model_fields))}",
        )
    try:
        said = type(config).model_fields if kind is type(config) else config.model_fields_set
        values = {name: getattr(config, name) for name in said}
        return kind.model_validate(values | {"use_wandb": False} | dict(changes)), servers
    except ValidationError as error:
        raise ConfigError(f"config of {cls.__name__}: {error}") from error


def _own_config(cls: Any, given: Any) -> Any:
    """The class of its configuration: that of config_init, or a subclass that only __init__ names."""
    try:
        said = get_type_hints(cls.__init__).get("config")
    except NameError:  # from another annotation
        return given
    return said if inspect.isclass(said) and issubclass(said, given) else given


def missing(who: str, error: ModuleNotFoundError) -> ConfigError | PluginError:
    """The error for a module that a file imports: its package is not installed, or is installed in another version."""
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
    """Import the file by its name, with its folder on the path. If it says `from .`, import it as part of the packages around it."""
    top, name = file.resolve().parent, file.stem
    if re.search(r"^\s*from \.", file.read_text(errors="replace"), re.MULTILINE):
        name, top = f"{top.name}.{name}", top.parent
        while (top / "__init__.py").is_file():
            name, top = f"{top.name}.{name}", top.parent
        folder = file.resolve().parent
        if not (folder / "__init__.py").is_file():  # a package without one; a module inside may have the same name
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
