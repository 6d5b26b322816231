"""What this package offers: the environment `gsm8k` and the model `tiny`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, ResolvedModel, RunContext
from atropos_env_gsm8k.config import Gsm8kOptions

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment

HERE = Path(__file__).parent


def build(options: Gsm8kOptions, context: RunContext) -> Environment:
    from atropos_env_gsm8k.environment import Gsm8k

    return Gsm8k(options)


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    return [Provider("gsm8k", "grade-school word problems, right or wrong", Gsm8kOptions, build)]


@hookimpl
def atropos_resolve_model(reference: str) -> ResolvedModel | None:
    if reference not in ("tiny", "tiny-teacher"):
        return None
    import tomllib

    preset = tomllib.loads((HERE / "tiny_preset.toml").read_text())
    if reference == "tiny-teacher":
        return ResolvedModel(HERE / "tiny_teacher", "tiny-teacher, which answers what tiny is to learn", preset)
    return ResolvedModel(HERE / "tiny", "tiny, the policy that comes with env_gsm8k", preset)
