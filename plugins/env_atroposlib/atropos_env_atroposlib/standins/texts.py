"""Helpers that environment files import: chats as ids and masks, tool calls, thinking, the best of several."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MASKED = -100
SPOKEN = ("assistant", "agent")  # roles that are trained
NO_CALL: tuple[str, dict[str, Any], bool] = ("-ERROR-", {}, True)


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Mapping[str, Any]],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """Ids and masks of a chat. A mask is the id in the last message, or in each of the assistant's, and MASKED elsewhere."""
    said = [dict(message) for message in chat]

    def ids(upto: int, *, prompt: bool) -> list[int]:
        return list(tokenizer.apply_chat_template(said[:upto], add_generation_prompt=prompt))

    tokens = ids(len(said), prompt=False)
    masks = [MASKED] * len(tokens)
    turns = [len(said) - 1]
    if train_on_all_assistant_turns:
        turns = [at for at, message in enumerate(said) if message["role"] in SPOKEN]
    for at in turns:
        begin = len(ids(at, prompt=True))
        end = len(ids(at + 1, prompt=False)) if train_on_all_assistant_turns else len(tokens)
        masks[begin:end] = tokens[begin:end]
    if finish_reason == "length" and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens, masks = tokens[:-1], masks[:-1]
    return {"tokens": tokens, "masks": masks} | ({"messages": chat} if include_messages else {})


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """The content of the first such tag."""
    for tag in preferred_tags or ("tool_call",):
        if found := re.search(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL):
            return found[1].strip()
    return None


def parse_tool_call(
    response: str,
    available_tools: Sequence[Mapping[str, Any]] | None = None,
    preferred_tags: Sequence[str] | None = None,
) -> tuple[str, dict[str, Any], bool]:
    """Name, arguments, and True if no call can be read. JSON is first read as it is, then with its quotes corrected."""
    content = extract_tool_call(response, preferred_tags)
    for text in (content, (content or "").replace("'", '"')):
        try:
            call = json.loads(text or "", strict=False)
            name, arguments = str(call.get("name", "")), call.get("arguments", {})
            break
        except (ValueError, AttributeError):
            continue
    else:
        return NO_CALL
    known = {str(tool.get("name") or tool.get("function", {}).get("name")) for tool in available_tools or ()}
    return ("-ERROR-", arguments, True) if known and name not in known else (name, arguments, False)


def select_best_index(
    primary_scores: Sequence[float],
    secondary_scores: Sequence[float],
    primary_higher_is_better: bool = True,
    secondary_lower_is_better: bool = True,
) -> int:
    """The index of the best first score; the second scores decide ties. Raises ValueError without scores, or if their numbers differ."""
    if not primary_scores or len(primary_scores) != len(secondary_scores):
        raise ValueError(f"{len(primary_scores)} primary and {len(secondary_scores)} secondary scores: as many of each")
    first = 1 if primary_higher_is_better else -1
    second = -1 if secondary_lower_is_better else 1
    return max(
        range(len(primary_scores)), key=lambda at: (first * primary_scores[at], second * secondary_scores[at], -at)
    )


async def parse_http_response(resp: Any, logger: Any = None) -> Any:
    """The JSON of an answer. Raises the client's error for a status other than success."""
    resp.raise_for_status()
    return await resp.json()


def strip_thinking(response_text: str) -> str:
    return re.sub(r"<think>.*?</think>", "", response_text, count=1, flags=re.DOTALL)


def truncate_thinking(response_text: str, tokenizer: Any, max_think_tokens: int) -> str:
    """The text with at most so many tokens of thinking: its last paragraph if that fits, else the end of that paragraph."""
    found = re.search(r"<think>(.*?)</think>", response_text, re.DOTALL)
    if not found:
        return response_text
    thought = found[1].strip()
    if len(tokenizer.encode(thought, add_special_tokens=False)) > max_think_tokens:
        last = [part.strip() for part in thought.split("\n\n") if part.strip()][-1]
        ids = tokenizer.encode(last, add_special_tokens=False)
        kept = ids if len(ids) <= max_think_tokens else ids[max(len(ids) - max_think_tokens, 0) :]
        kept = kept if max_think_tokens > 0 else []
        thought = f"... {tokenizer.decode(kept, skip_special_tokens=True).strip()}" if kept else ""
    body = f"\n{thought}\n" if thought else ""
    before, after = response_text[: found.start()], response_text[found.end() :]
    return f"{before}<think>{body}</think>{after.lstrip()}"


def ensure_trajectory_token_limit(
    trajectory: Sequence[dict[str, Any]], tokenizer: Any, max_trajectory_tokens: int
) -> list[dict[str, Any]]:
    """Shorten steps of several alternatives until all alternatives fit, from the oldest message after the first. Leave out a step
    that cannot fit."""
    kept = []
    for step in trajectory:
        if made := _within(step, tokenizer, max_trajectory_tokens):
            kept.append(made)
    return kept


def _within(step: dict[str, Any], tokenizer: Any, most: int) -> dict[str, Any] | None:
    tokens, masks = list(step.get("tokens") or ()), list(step.get("masks") or ())
    chats = [list(chat) for chat in step.get("messages") or ()]
    if not tokens or len(chats) != len(tokens):
        return None
    while max(map(len, tokens)) > most:
        kept_behind = [2 if len(chat) > 2 and chat[-2]["role"] == "environment" else 1 for chat in chats]
        spare = min(len(chat) - 1 - behind for chat, behind in zip(chats, kept_behind, strict=True))
        if spare <= 0:
            return None
        for chat in chats:
            del chat[1 : 1 + min(spare, 2)]
        made = [tokenize_for_trainer(tokenizer, chat) for chat in chats]
        tokens, masks = [one["tokens"] for one in made], [one["masks"] for one in made]
    return {**step, "messages": chats, "tokens": tokens, "masks": masks}


def parse_args_and_command(*ignored: Any) -> Callable[..., Any]:
    raise NotImplementedError("environments have no command line here: run them with `atropos run`")
