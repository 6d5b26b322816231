"""Register the environments `gsm8k` and `calculator`, and models small enough to learn them on a laptop."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, ResolvedModel, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment
    from atropos_core.plugins.options import NoOptions
    from atropos_env_gsm8k.config import Gsm8kOptions

HERE = Path(__file__).parent
MODELS = {  # by name: its folder, its description, and its preset
    "tiny": ("tiny", "the policy that comes with env_gsm8k", "tiny_preset.toml"),
    "tiny-teacher": ("tiny_teacher", "which answers what tiny is to learn", "tiny_preset.toml"),
    "tiny-tools": ("tiny_tools", "a policy that calls tools, which comes with env_gsm8k", "tiny_tools_preset.toml"),
}


def build(options: Gsm8kOptions, context: RunContext) -> Environment:
    from atropos_env_gsm8k.environment import Gsm8k

    return Gsm8k(options)


def build_calculator(options: NoOptions, context: RunContext) -> Environment:
    from atropos_env_gsm8k.calculator import Calculator

    return Calculator()


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    return [
        Provider("gsm8k", "grade-school word problems, right or wrong", "atropos_env_gsm8k.config:Gsm8kOptions", build),
        Provider("calculator", "word problems in up to four turns, with a calculator", None, build_calculator),
    ]


@hookimpl
def atropos_resolve_model(reference: str) -> ResolvedModel | None:
    if reference not in MODELS:
        return None
    import tomllib

    folder, what, preset = MODELS[reference]
    return ResolvedModel(HERE / folder, f"{reference}, {what}", tomllib.loads((HERE / preset).read_text()))
