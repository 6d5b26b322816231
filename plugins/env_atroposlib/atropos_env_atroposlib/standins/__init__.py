"""Modules under atroposlib's names, only in this process: what its environment files import, connected to our policy.

An installed atroposlib is not used: its names are taken before the environment's file is imported. Importing a name that is
missing here raises an ImportError that says so.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

PACKAGES = {  # their names, and the module with their own contents
    "atroposlib": "",
    "atroposlib.api": "base",
    "atroposlib.envs": "",
    "atroposlib.envs.reward_fns": "rewards",
    "atroposlib.envs.server_handling": "",
    "atroposlib.utils": "texts",
}
MODULES = {
    "atroposlib.api.config": "base",
    "atroposlib.envs.base": "base",
    "atroposlib.envs.constants": "base",
    "atroposlib.envs.eval": "evals",
    "atroposlib.envs.teacher_distillation_env": "base",
    "atroposlib.envs.reward_fns.combined_reward": "rewards",
    "atroposlib.envs.reward_fns.registry": "rewards",
    "atroposlib.envs.reward_fns.reward_function": "rewards",
    "atroposlib.envs.server_handling.managed_server": "managed",
    "atroposlib.envs.server_handling.openai_server": "servers",
    "atroposlib.envs.server_handling.server_baseline": "servers",
    "atroposlib.envs.server_handling.server_manager": "servers",
    "atroposlib.type_definitions": "names",
    "atroposlib.utils.best_of_n_selection": "texts",
    "atroposlib.utils.io": "texts",
    "atroposlib.utils.message_history_utils": "texts",
    "atroposlib.utils.tokenize_for_trainer": "texts",
    "atroposlib.utils.tool_call_parser": "texts",
}


def install() -> None:
    """Put the stand-ins into `sys.modules`."""
    for name, ours in PACKAGES.items():
        package = _package(name)
        if ours:
            _offer(package, ours)
    for name, ours in MODULES.items():
        module = sys.modules[name] = ModuleType(name, "a stand-in of atropos_env_atroposlib")
        _offer(module, ours)
        _attach(name, module)


def _package(name: str) -> ModuleType:
    package = sys.modules[name] = ModuleType(name, "a stand-in of atropos_env_atroposlib")
    package.__path__ = []
    _attach(name, package)
    return package


def _attach(name: str, module: ModuleType) -> None:
    above, _, own = name.rpartition(".")
    if above and not hasattr(sys.modules[above], own):
        setattr(sys.modules[above], own, module)


def _offer(module: ModuleType, ours: str) -> None:
    found = importlib.import_module(f"{__name__}.{ours}")
    vars(module).update({key: value for key, value in vars(found).items() if not key.startswith("_")})
