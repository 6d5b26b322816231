"""Warnings about the model's special tokens in texts: prompts that contain them, rewards that look for one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from atropos_core import console
from atropos_core.interfaces import Environment
from atropos_core.rollouts.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from atropos_core.config.resolve import ResolvedComponent

KINDS = ("environment", "reward")
LOOKED_AT = 200  # tasks of an environment
LOOK_S = 1.0
RARE = 0.05  # a smaller share of tasks with long answers needs no warning
_TURN = re.compile(  # how turns begin in templates of ChatML, Llama, gpt-oss, Phi, GLM, Command, Gemma, Mistral and DeepSeek
    r"<\|(?:im_start|start_header_id|start|user|assistant|system|START_OF_TURN_TOKEN|turn)\|?>|<start_of_turn>|\[INST\]"
    r"|<\uff5c(?:User|Assistant)\uff5c>"
)
_FILE = re.compile(r"(.+\.py):\w+")


def warn_of_prompts(name: str, environment: Environment, tokenizer: ChatTokenizer) -> None:
    """Warn if training prompts contain control tokens of the model, or turn markers of another model, as prompts do that a chat
    template was already applied to. Lazy tasks are checked for at most LOOK_S."""
    tasks, until, found, looked_at = environment.tasks("train"), monotonic() + LOOK_S, {}, 0
    while looked_at < min(len(tasks), LOOKED_AT) and monotonic() < until:
        task = tasks[looked_at]
        looked_at += 1
        if token := tokenizer.control_token_in(task.messages):
            found[task.id] = token, "the model"
        elif token := next(filter(None, map(_turn_of_another, task.messages)), ""):
            found[task.id] = token, "another model"
    if found:
        task_id, (token, whose) = next(iter(found.items()))
        console.warn(
            f"environment {name!r}: {len(found)} of the first {looked_at} prompts have control tokens of {whose} in them, {token!r} "
            f"in task {task_id!r}. The policy is shown them as text, inside its own chat template. Give prompts without a template: "
            "plain text, or messages."
        )


def warn_of_long_answers(name: str, environment: Environment, tokenizer: ChatTokenizer, max_tokens: int) -> None:
    """Warn if the known answers of more than a few training tasks have more tokens than a reply may have. Lazy tasks are checked
    for at most LOOK_S."""
    tasks, until = environment.tasks("train"), monotonic() + LOOK_S
    lengths: list[int] = []
    while len(lengths) < min(len(tasks), LOOKED_AT) and monotonic() < until:
        answer = tasks[len(lengths)].answer or ""
        # a token is a byte at least
        lengths.append(len(tokenizer.encode(answer)) if len(answer.encode()) > max_tokens else 0)
    if len(long := [length for length in lengths if length > max_tokens]) > RARE * len(lengths):
        console.warn(
            f"environment {name!r}: the known answers of {len(long)} of the first {len(lengths)} tasks have more than "
            f"{max_tokens} tokens, up to {max(long)}, so replies like them are cut off. Raise sampling.max_tokens."
        )


def warn_of_rewards(components: Mapping[str, Mapping[str, ResolvedComponent]], tokenizer: ChatTokenizer) -> None:
    """Warn of each environment or reward that looks for a special token, which replies never show: in its options, or in the file
    of a function that they name. `components`: by kind and name."""
    for label, resolved in ((f"{of}.{name}", one) for of in KINDS for name, one in components.get(of, {}).items()):
        options = [resolved.component.use, *_texts(resolved.options.model_dump(mode="json"))]
        files = [Path(match[1]) for text in options if (match := _FILE.fullmatch(text))]
        texts = [*options, *(file.read_text(errors="replace") for file in files if file.is_file())]
        sought = sorted(token for token in tokenizer.dropped if any(token in text.replace("\\", "") for text in texts))
        if sought:
            console.warn(
                f"{label} looks for {', '.join(map(repr, sought))}. The model's tokenizer marks that as special, so replies are read "
                'without it, and it is never found. Mark it as an ordinary token: "special": false in tokenizer.json. Also remove it '
                "from the special tokens of tokenizer_config.json."
            )


def _turn_of_another(message: Mapping[str, Any]) -> str:
    found = _TURN.search(str(message.get("content")))
    return found[0] if found else ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(entry)
