"""The environment's process: `python -m atropos_env_verifiers.host DESCRIPTOR ROLE`. Only `VerifiersEnvironment` starts it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from types import ModuleType
from typing import Any

from atropos_core.errors import AtroposError, ConfigError, DataError
from atropos_core.guards.deadlines import within
from atropos_core.processes.child_main import Host, main
from atropos_env_kit.local_datasets import serve_datasets
from atropos_env_verifiers.contract import Access, Contract, Part, digest

CHUNK = 500  # tasks in one answer
V0, V1 = "verifiers==0.1.14", "verifiers==0.4.0"  # versions that have each contract


class EnvironmentHost(Host):
    """One environment of verifiers."""

    def __init__(self) -> None:
        super().__init__()
        self._contract: Contract
        self._prompts: Mapping[Part, Sequence[Sequence[Mapping[str, Any]]]] = {}

    async def build(self, wanted: dict[str, Any]) -> None:
        """`wanted`: id, folder, config, datasets. Raises ConfigError for an environment that cannot be loaded."""
        if wanted["folder"]:
            sys.path.insert(0, wanted["folder"])
            # A Taskset's tool servers are Python programs that import the environment's module.
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (wanted["folder"], os.environ.get("PYTHONPATH"))))
        serve_datasets(wanted["datasets"])
        self._contract = load(wanted["id"], wanted["config"])
        for call in (self.open_environment, self.prompts, self.run):
            self.peer.handlers[call.__name__] = call

    async def open_environment(self, at_most: int) -> dict[str, Any]:
        """Load the environment's data. Returns what it is, and how many tasks each of its data sets has."""
        try:
            self._prompts = await self._contract.open(at_most)
        except Exception as error:
            traceback.print_exc()  # into the log
            raise ConfigError(f"its tasks could not be loaded: {type(error).__name__}: {error}") from error
        sizes = {part: len(prompts) for part, prompts in self._prompts.items()}
        return {"contract": self._contract.name, "agents": list(self._contract.agents), "sizes": sizes}

    async def prompts(self, part: Part, first: int) -> str:
        """The opening messages of tasks from `first` on, as JSON."""
        return json.dumps(self._prompts[part][first : first + CHUNK])

    async def run(self, part: Part, index: int, seen: str, accesses: Sequence[Mapping[str, Sequence[str]]]) -> str:
        """Run a group and return its outcomes as JSON. `seen`: the digest of the task's prompt when it was loaded."""
        if digest(self._prompts[part][index]) != seen:
            raise DataError(
                "the environment was loaded again and its tasks differ: they are drawn at random, or their source has changed",
                remedy="Give their generator a seed in [environment.NAME.config].",
            )
        given = [{agent: Access(*access) for agent, access in one.items()} for one in accesses]
        return json.dumps([outcome.record() for outcome in await self._contract.run(part, index, given)])

    async def close(self) -> None:
        if hasattr(self, "_contract"):
            await within(self._contract.close(), 5.0, "the environment's end")
        self.ended.set()


def load(id: str, config: Mapping[str, Any]) -> Contract:
    """Load an environment by the contract of its module. Raises ConfigError, which names the configuration only if every import worked."""
    make = _made_by(id)
    try:
        return make(config)
    except AtroposError:
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc()  # into the log
        raise _import_error(id, error) or ConfigError(
            f"verifiers' environment {id!r} could not be loaded: {type(error).__name__}: {error}",
            remedy="Look at [environment.NAME.config], and at the environment's own module.",
        ) from error


def _made_by(id: str) -> Callable[[Mapping[str, Any]], Contract]:
    """Import the environment's module, and ours for its contract. Raises ConfigError."""
    name = id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"verifiers' environment {id!r} does not name a module.",
            remedy="Give the id as owner/name, or a module's name.",
        )
    inside = f"verifiers.v1.tasksets.{name.lower()}"
    try:
        has_tasksets = name.isidentifier() and importlib.util.find_spec("verifiers.v1.taskset") is not None
        own = has_tasksets and importlib.util.find_spec("verifiers.v1.tasksets") and importlib.util.find_spec(inside)
        module = importlib.import_module(inside if own else name)
        if hasattr(module, "load_environment"):
            import verifiers

            if not hasattr(verifiers, "load_environment"):
                raise _other(id, "v0 (load_environment)", V0)
            from atropos_env_verifiers.load_environment import LoadEnvironment

            return partial(LoadEnvironment, module)
        if not _has_taskset(module):
            raise ConfigError(
                f"verifiers' environment {id!r} has neither load_environment nor a Taskset in its module {module.__name__!r}.",
                remedy="Name the module that has one.",
            )
        if importlib.util.find_spec("verifiers.v1.clients") is None:
            raise _other(id, "v1 (a Taskset)", V1)
        from atropos_env_verifiers.taskset import TasksetEnvironment

        return partial(TasksetEnvironment, id)
    except AtroposError:
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc()  # into the log
        if isinstance(error, ModuleNotFoundError) and error.name in (name, name.split(".")[0]):
            raise ConfigError(
                f"environment {id!r} has no module {name!r} on this machine.",
                remedy="Install its package, or name the folder of its module: folder in [environment.NAME].",
            ) from error
        raise _import_error(id, error) or ConfigError(
            f"verifiers' environment {id!r} could not be imported: {type(error).__name__}: {error}",
            remedy="Look at its module, and at what that imports.",
        ) from error


def _has_taskset(module: ModuleType) -> bool:
    """Look for a class of verifiers' contract v1 among what a module has or exports."""
    values = [getattr(module, name, None) for name in {*vars(module), *getattr(module, "__all__", ())}]
    return any(base.__name__ == "Taskset" for one in values if isinstance(one, type) for base in one.__mro__)


def _import_error(id: str, error: BaseException) -> ConfigError | None:
    """The error that says what an import failed on and which version is installed; None if no import failed."""
    if isinstance(error, ImportError):
        missing = error.name or ""
    elif isinstance(error, AttributeError) and isinstance(
        error.obj, ModuleType
    ):  # verifiers imports the module that it is asked for
        missing = error.obj.__name__
    else:
        return None
    top = missing.split(".")[0]
    if not top:  # for example, verifiers raises this for an unknown id in the configuration
        return None
    absent = isinstance(error, ModuleNotFoundError) and top not in sys.stdlib_module_names and not _is_there(top)
    if top == "verifiers" or (not absent and _raised_in(error) == "verifiers"):
        return ConfigError(
            f"verifiers' environment {id!r} does not work with {_installed('verifiers')}: {type(error).__name__}: {error}. "
            "Environments with load_environment (contract v0) need verifiers 0.1.14 to 0.2.1, those with a Taskset (v1) 0.4.0.",
            remedy=f"pip install {V0} if it has load_environment, or {V1} if it has a Taskset.",
        )
    if absent:
        return ConfigError(
            f"verifiers' environment {id!r} imports {missing!r}, which is not installed.", remedy=f"pip install {top}"
        )
    if isinstance(error, ImportError):
        return ConfigError(
            f"verifiers' environment {id!r} imports what {_installed(top)} has not: {type(error).__name__}: {error}",
            remedy=f"Install a version of {top} that has it.",
        )
    return None


def _is_there(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is not None
    except ValueError:  # a module without a spec
        return top in sys.modules


def _raised_in(error: BaseException) -> str:
    """The package whose line raised it, the import system aside."""
    names = [frame.f_globals.get("__name__") or "" for frame, _ in traceback.walk_tb(error.__traceback__)]
    tops = [name.split(".")[0] for name in names]
    return next((top for top in reversed(tops) if top not in ("importlib", "_frozen_importlib")), "")


def _installed(top: str) -> str:
    """An installed package, with its version if it has one."""
    if top in sys.stdlib_module_names:
        return f"Python {platform.python_version()}"
    found = packages_distributions().get(top, [top])[0]
    try:
        return f"{found} {version(found)}"
    except PackageNotFoundError:
        return top


def _other(id: str, contract: str, wanted: str) -> ConfigError:
    return ConfigError(
        f"verifiers' environment {id!r} is of the contract {contract}, which {_installed('verifiers')} has not.",
        remedy=f"pip install {wanted}",
    )


if __name__ == "__main__":
    main(EnvironmentHost)
