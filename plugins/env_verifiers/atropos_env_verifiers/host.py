"""The environment's own process: `python -m atropos_env_verifiers.host DESCRIPTOR ROLE`, started by `VerifiersEnvironment` alone."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from atropos_core.errors import AtroposError, ConfigError, DataError
from atropos_core.guards.deadlines import within
from atropos_core.processes.child_main import Host, main
from atropos_core.rollouts.local_datasets import serve_datasets
from atropos_env_verifiers.contract import Access, Contract, Part, digest

CHUNK = 500  # tasks in one answer


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
            # Tool servers of a Taskset are programs of Python that import the environment's module.
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (wanted["folder"], os.environ.get("PYTHONPATH"))))
        serve_datasets(wanted["datasets"])
        self._contract = load(wanted["id"], wanted["config"])
        for call in (self.open_environment, self.prompts, self.run):
            self.peer.handlers[call.__name__] = call

    async def open_environment(self, at_most: int) -> dict[str, Any]:
        """Load its data. Says what it is, and how many tasks each of its data sets has."""
        try:
            self._prompts = await self._contract.open(at_most)
        except Exception as error:
            traceback.print_exc()  # into the log
            raise ConfigError(f"its tasks could not be loaded: {type(error).__name__}: {error}") from error
        sizes = {part: len(prompts) for part, prompts in self._prompts.items()}
        return {"contract": self._contract.name, "agents": list(self._contract.agents), "sizes": sizes}

    async def prompts(self, part: Part, first: int) -> str:
        """Opening messages as JSON, of tasks from `first` on."""
        return json.dumps(self._prompts[part][first : first + CHUNK])

    async def run(self, part: Part, index: int, seen: str, accesses: Sequence[Mapping[str, Sequence[str]]]) -> str:
        """A group's outcomes as JSON. `seen`: the digest of the prompt that this task had."""
        if digest(self._prompts[part][index]) != seen:
            raise DataError(
                "loaded again, the environment has other tasks: they are drawn at random, or their source has changed",
                remedy="Give what makes them a seed, in [environment.NAME.config].",
            )
        given = [{agent: Access(*access) for agent, access in one.items()} for one in accesses]
        return json.dumps([outcome.record() for outcome in await self._contract.run(part, index, given)])

    async def close(self) -> None:
        if hasattr(self, "_contract"):
            await within(self._contract.close(), 5.0, "the environment's end")
        self.ended.set()


def load(id: str, config: Mapping[str, Any]) -> Contract:
    """By the contract that its module is of. Raises ConfigError."""
    name = id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    has_tasksets = importlib.util.find_spec("verifiers.v1.taskset") is not None
    inside = f"verifiers.v1.tasksets.{name.lower()}"
    try:
        own = has_tasksets and importlib.util.find_spec("verifiers.v1.tasksets") and importlib.util.find_spec(inside)
        module = importlib.import_module(inside if own else name)
        if hasattr(module, "load_environment"):
            import verifiers

            if not hasattr(verifiers, "load_environment"):
                raise _other(id, "v0 (load_environment)", "verifiers==0.1.14")
            from atropos_env_verifiers.load_environment import LoadEnvironment

            return LoadEnvironment(module, config)
        if importlib.util.find_spec("verifiers.v1.clients") is None:
            raise _other(id, "v1 (a Taskset)", "verifiers==0.4.0")
        from atropos_env_verifiers.taskset import TasksetEnvironment

        return TasksetEnvironment(id, config)
    except AtroposError:
        raise
    except ModuleNotFoundError as error:
        if error.name != name:
            raise ConfigError(
                f"verifiers' environment {id!r} imports {error.name!r}, which is not installed.",
                remedy=f"pip install {error.name}",
            ) from error
        raise ConfigError(
            f"there is no module {name!r} of an environment {id!r}.",
            remedy="Install its package, or say where its module is: folder in [environment.NAME].",
        ) from error
    except (Exception, SystemExit) as error:
        traceback.print_exc()  # into the log
        raise ConfigError(
            f"verifiers' environment {id!r} could not be loaded: {type(error).__name__}: {error}",
            remedy="Look at [environment.NAME.config].",
        ) from error


def _other(id: str, contract: str, wanted: str) -> ConfigError:
    return ConfigError(
        f"verifiers' environment {id!r} is of the contract {contract}, which verifiers {version('verifiers')} has not.",
        remedy=f"pip install {wanted}",
    )


if __name__ == "__main__":
    main(EnvironmentHost)
