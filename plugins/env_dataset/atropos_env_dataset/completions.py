"""Rows with completions for a warm start, as token sequences.

A row is `prompt` and `completion` (each a text, or messages), or `messages`. All go through the model's chat template, as prompts of
`dataset` do: a text is a message of the user or the assistant. The loss counts what TRL's SFTTrainer counts for conversations: with
`completion`, everything after the prompt; with `messages`, each reply of the assistant with the token that ends it
(assistant_only_loss). TRL takes a prompt and a completion that are texts as they are, without a template.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from atropos_core import console
from atropos_core.errors import ConfigError, DataError
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import UNKNOWN_VERSION, Bools, Message, Rollout, Tokens
from atropos_env_kit.row_files import Row, columns_in, read_rows, value_at
from atropos_env_kit.task_files import Columns, task_of

if TYPE_CHECKING:
    from atropos_core.config.run_file import WarmupSection

EPOCHS = 3  # as TRL's SFTConfig
HELD_OUT = (10, 64)  # one row in so many, and at most so many rows
NAMED = 5  # rows that a warning names
STREAM = 0x5F7  # of the run's seed: other random numbers than those of draws
EXAMPLE = 'One a line: {"prompt": "What is 2 + 2?", "completion": "2 + 2 is 4. #### 4"}'


@dataclass(frozen=True)
class CompletionRows:
    """The rows of a warm start, and their order."""

    trained: Sequence[Rollout]
    held_out: Sequence[Rollout]
    steps: int
    section: WarmupSection
    seed: int
    summary: str

    def batch(self, step: int) -> Sequence[Rollout]:
        """Return the rows of a step. Each epoch has another order; its last batch may be smaller."""
        epoch, place = divmod(step - 1, self._steps_per_epoch)
        order = np.random.default_rng([self.seed, STREAM, epoch]).permutation(len(self.trained))
        size = self.section.rows_per_step
        return [self.trained[at] for at in order[place * size : (place + 1) * size]]

    def rate(self, step: int) -> float:
        """Return the share of the highest learning rate: it rises from 1 / n to 1 in the first n steps, and falls to 0 at step
        `steps` + 1, as with the schedulers of transformers."""
        rising = math.ceil(self.section.rise * self.steps)
        if step <= rising:
            return step / rising
        done = (step - 1 - rising) / (self.steps - rising)
        falls = {"linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2, "constant": 1.0}
        return falls[self.section.schedule]

    @cached_property
    def digest(self) -> str:
        made = sha256(f"{self.seed} {self.steps} {self.section.rows_per_step} {len(self.trained)}".encode())
        for row in (*self.trained, *self.held_out):
            made.update(row.tokens.tobytes() + row.trained.tobytes())
        return made.hexdigest()[:16]

    @property
    def _steps_per_epoch(self) -> int:
        return -(-len(self.trained) // self.section.rows_per_step)


def open_completions(section: WarmupSection, tokenizer: ChatTokenizer, *, max_tokens: int, seed: int) -> CompletionRows:
    """Read the rows of a [warmup]. Rows with more than `max_tokens` tokens are left out, and named. Raises DataError that names file
    and row, and ConfigError for a model without a chat template."""
    if tokenizer.template is None:
        raise ConfigError(
            f"[warmup] shows rows to the model by its chat template, and the model in {tokenizer.directory} has none.",
            remedy="Use a model with a chat template, or put one there: chat_template.jinja.",
        )
    kept: list[Rollout] = []
    long: list[tuple[str, int]] = []
    for where, row in read_rows(section.data, section.prompt):
        made = sequence_of(row, where, tokenizer, section)
        if len(made.tokens) > max_tokens:
            long.append((where, len(made.tokens)))
        else:
            kept.append(made)
    _say_long(section, long, len(kept), max_tokens)
    order = np.random.default_rng([seed, STREAM]).permutation(len(kept))
    share, most = HELD_OUT
    held_out = min(len(kept) // share, most) if section.held_out is None else section.held_out
    if held_out >= len(kept):
        raise DataError(
            f"{section.data}: warmup.held_out = {held_out} leaves no row to train on: there are {len(kept)}.",
            remedy="Lower warmup.held_out, or name more rows.",
        )
    trained = [kept[at] for at in sorted(order[held_out:])]
    per_epoch = -(-len(trained) // section.rows_per_step)
    steps = section.steps or per_epoch * (section.epochs or EPOCHS)
    summary = f"{len(trained):,} rows of {section.data}, {section.rows_per_step} a step, {held_out} held out"
    return CompletionRows(trained, [kept[at] for at in sorted(order[:held_out])], steps, section, seed, summary)


def sequence_of(row: Row, where: str, tokenizer: ChatTokenizer, section: WarmupSection) -> Rollout:
    """Return one row as a sequence whose replies are trained. Raises DataError."""
    columns = Columns(section.prompt, answer="")
    completion = value_at(row, section.completion)
    if completion is None and row.get("messages") is None:
        raise DataError(
            f"{where} has no column {section.completion!r} and no messages. It has {', '.join(map(repr, columns_in(row))) or 'none'}.",
            remedy=f"Name the column with the reply: --set warmup.completion=COLUMN. {EXAMPLE}",
        )
    opening = {name: value for name, value in row.items() if name != section.completion}
    task = task_of(opening, where, 0, columns)
    tools = task.data.get("tools") or None
    if completion is None:
        messages: list[Message] = list(task.messages)
        starts = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
        if not starts or starts[0] == 0:
            says = "begins with a reply of the assistant" if starts else "has no reply of the assistant"
            raise DataError(
                f"{where}: the conversation {says}.", remedy="Begin with a message of the user, and reply to it."
            )
        whole = tokenizer.render(messages, tools, reply_follows=False)
        trained = np.zeros(len(whole), np.bool_)
        for start in starts:
            begin = _prompt_length(messages[:start], tools, whole, where, tokenizer)
            trained[begin : _end(whole, begin, where, tokenizer)] = True
    else:
        if task.messages[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: the prompt ends with a reply of the assistant, and {section.completion} is another one.",
                remedy="Move that message to the completion, or name the conversation `messages`.",
            )
        messages = [*task.messages, *_replies(completion, where, section.completion)]
        whole = tokenizer.render(messages, tools, reply_follows=False)
        begin = _prompt_length(task.messages, tools, whole, where, tokenizer)
        _end(whole, begin, where, tokenizer)
        trained = np.arange(len(whole)) >= begin
    return _rollout(whole, trained)


def _replies(completion: Any, where: str, name: str) -> Sequence[Message]:
    if isinstance(completion, str):  # a reply, or messages, as in a cell of a CSV file
        said = task_of({name: completion}, where, 0, Columns(name, answer="")).messages
        if said == ({"role": "user", "content": completion},):
            said = ({"role": "assistant", "content": completion},)
    else:
        said = task_of({"messages": completion}, where, 0, Columns(answer="")).messages
    if said[0]["role"] != "assistant":
        raise DataError(
            f"{where}: {name} begins with a message of the role {said[0]['role']!r}.",
            remedy="A completion is what the assistant says; what comes before it belongs to the prompt.",
        )
    return said


def _prompt_length(messages: Sequence[Message], tools: Any, whole: Tokens, where: str, tokenizer: ChatTokenizer) -> int:
    """Return the number of tokens before a reply. Raises DataError if they are not the beginning of the whole conversation, so that the
    policy would see another prompt than the one that is trained."""
    prompt = tokenizer.render(messages, tools)
    if not np.array_equal(whole[: len(prompt)], prompt):
        same = np.flatnonzero(whole[: len(prompt)] != prompt[: len(whole)])
        at = int(same[0]) if len(same) else min(len(whole), len(prompt))
        shown = [tokenizer.decode(ids[max(at - 4, 0) : at + 4], keep_special=True) for ids in (prompt, whole)]
        raise DataError(
            f"{where}: the tokens of the prompt are not the beginning of those of prompt and reply: {shown[0]!r:.80} became "
            f"{shown[1]!r:.80}. The chat template writes a prompt in another way once a reply follows.",
            remedy="Write the reply as the model would give it after its prompt, with its reasoning if the template opens one; or use "
            "another template.",
        )
    return len(prompt)


def _end(whole: Tokens, begin: int, where: str, tokenizer: ChatTokenizer) -> int:
    """Return the position after the token that ends the reply at `begin`. Raises DataError if there is none."""
    found = next((at for at in range(begin, len(whole)) if tokenizer.is_end(int(whole[at]))), None)
    if found is None:
        raise DataError(
            f"{where}: the chat template writes no token that ends a reply, so the policy would learn not to stop.",
            remedy="Let the template write the end token after each reply, or name that token as eos_token in tokenizer_config.json.",
        )
    return found + 1


def _rollout(tokens: Tokens, trained: Bools) -> Rollout:
    none = np.zeros(len(tokens), np.bool_)
    versions = np.full(len(tokens), UNKNOWN_VERSION, np.int32)
    return Rollout(tokens, none, trained, None, versions, 1.0, advantages=trained.astype(np.float32), sft=True)


def _say_long(section: WarmupSection, long: Sequence[tuple[str, int]], kept: int, most: int) -> None:
    if not long:
        if not kept:
            raise DataError(f"{section.data} has no rows.", remedy=EXAMPLE)
        return
    named = "; ".join(
        f"{where.removeprefix(str(section.data)).lstrip(', ')} has {count:,}" for where, count in long[:NAMED]
    )
    fact = f"{section.data}: {len(long):,} of {len(long) + kept:,} rows have more than {most:,} tokens (warmup.max_tokens): {named}"
    if not kept:
        raise DataError(f"{fact}. None is left.", remedy=f"--set warmup.max_tokens={max(count for _, count in long)}")
    console.warn(f"{fact}{'; ...' if len(long) > NAMED else ''}. They are left out.")
