"""Code that a run file names by where it stands: `pkg.mod:Name` or `./file.py:Name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core.errors import ConfigError, EndsProcess, PluginError
from atropos_core.guards.exits import contained
from atropos_core.plugins.provider import NoOptions, Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment, Loss


def provider_of_class(reference: str) -> Provider[Environment]:
    from atropos_core.interfaces import Environment

    made = load_reference(reference)
    if not (inspect.isclass(made) and issubclass(made, Environment)):
        raise ConfigError(f"{reference!r} is not a class derived from atropos_core.Environment, but {made!r}.")
    options = getattr(made, "Options", NoOptions)

    factory: Callable[..., Environment] = made

    def build(values: Any, context: RunContext) -> Environment:
        return factory() if isinstance(values, NoOptions) else factory(values)

    summary = next(iter((made.__doc__ or "your own environment").splitlines()))
    return Provider(name=reference, summary=summary, config=options, build=build)


def provider_of_loss(reference: str) -> Provider[Loss]:
    made = load_reference(reference)
    if not hasattr(made, "findings"):
        raise ConfigError(
            f"{reference!r} is not a loss, but {made!r}.",
            remedy="A function becomes one by the trainer's decorator: docs/hooks.md.",
        )
    return Provider(name=reference, summary="your own loss", config=NoOptions, build=lambda values, context: made)


def load_reference(reference: str) -> Any:
    """Import `pkg.mod:Name` or `./file.py:Name`. A file with a single environment needs no `:Name`."""
    from atropos_core.interfaces import Environment

    where, _, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    try:
        with contained(f"importing {where}"):
            module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except EndsProcess as error:
        raise PluginError(f"{reference!r} could not be imported: {error}") from error
    except ModuleNotFoundError as error:
        if error.name and where.split(".")[0] == error.name.split(".")[0]:
            raise ConfigError(
                f"{reference!r}: no module named {error.name!r}. A file is named ./file.py:Class."
            ) from error
        raise PluginError(f"{reference!r} could not be imported: {error}") from error
    except Exception as error:
        raise PluginError(f"{reference!r} could not be imported: {type(error).__name__}: {error}") from error
    if not name:
        found = [
            value
            for value in vars(module).values()
            if inspect.isclass(value) and issubclass(value, Environment) and value.__module__ == module.__name__
        ]
        if len(found) != 1:
            raise ConfigError(f"{reference!r} has {len(found)} environments: say which, as {reference}:Class.")
        return found[0]
    try:
        return getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, [key for key in vars(module) if not key.startswith("_")], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{reference!r}: there is no {name!r} in it.{hint}") from None


def _load_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.")
    name = f"atropos_file_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
