"""The core of Atropos: the vocabulary, the hooks and the loop. No ML framework inside."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atropos_core.conversation import Conversation as Conversation
    from atropos_core.interfaces import Adapter as Adapter
    from atropos_core.interfaces import Bridge as Bridge
    from atropos_core.interfaces import Curriculum as Curriculum
    from atropos_core.interfaces import Engine as Engine
    from atropos_core.interfaces import Environment as Environment
    from atropos_core.interfaces import Launcher as Launcher
    from atropos_core.interfaces import Reward as Reward
    from atropos_core.interfaces import Sandbox as Sandbox
    from atropos_core.interfaces import Sink as Sink
    from atropos_core.interfaces import Teacher as Teacher
    from atropos_core.interfaces import Trainer as Trainer
    from atropos_core.interfaces import Transform as Transform
    from atropos_core.plugins.options import Options as Options
    from atropos_core.plugins.provider import Provider as Provider
    from atropos_core.plugins.spec import hookimpl as hookimpl
    from atropos_core.plugins.spec import hookspec as hookspec
    from atropos_core.rollouts.replies import whole_reply as whole_reply
    from atropos_core.scripting.commands import check as check
    from atropos_core.scripting.commands import doctor as doctor
    from atropos_core.scripting.commands import evaluate as evaluate
    from atropos_core.scripting.commands import export as export
    from atropos_core.scripting.commands import installed as installed
    from atropos_core.scripting.commands import process as process
    from atropos_core.scripting.commands import resume as resume
    from atropos_core.scripting.commands import run as run
    from atropos_core.scripting.commands import save_view as save_view
    from atropos_core.scripting.commands import view as view
    from atropos_core.types import Episode as Episode
    from atropos_core.types import Score as Score
    from atropos_core.types import Task as Task

__version__ = "0.1.0"

_HOME = {  # what environments and plugins are written with, and the commands as functions; imported on first use
    "Conversation": "conversation",
    "Episode": "types",
    "Options": "plugins.options",
    "Provider": "plugins.provider",
    "Score": "types",
    "Task": "types",
    "hookimpl": "plugins.spec",
    "hookspec": "plugins.spec",
    "whole_reply": "rollouts.replies",
    **dict.fromkeys(
        (
            "Adapter",
            "Bridge",
            "Curriculum",
            "Engine",
            "Environment",
            "Launcher",
            "Reward",
            "Sandbox",
            "Sink",
            "Teacher",
            "Trainer",
            "Transform",
        ),
        "interfaces",
    ),
    **dict.fromkeys(
        ("check", "doctor", "evaluate", "export", "installed", "process", "resume", "run", "save_view", "view"),
        "scripting.commands",
    ),
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'atropos_core' has no attribute {name!r}")
    return getattr(import_module(f"atropos_core.{_HOME[name]}"), name)
