"""The policy's tokenizer and chat template, without transformers.

`tokenizers` and a process with jinja2 (`chat_template.py`) take 0.07 s and 25 MB, transformers' tokenizer 2.9 s and 251 MB, so the
supervisor can afford one. Sampled tokens are never decoded and encoded again: `extend` renders only what is new.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core.errors import ConfigError, DataError
from atropos_core.rollouts.dropped_messages import DroppedMessages
from atropos_core.rollouts.replies import (
    IN_HISTORIES,
    READ,
    SENTINEL,
    ReplyReader,
    end_of_turn,
    message_of,
    opening_of,
)
from atropos_core.storage.reading import json_object, read_text
from atropos_core.types import Message, Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from atropos_core.rollouts.chat_template import ChatTemplate
    from atropos_core.rollouts.control_tokens import ControlTokens

_LONGEST_TOKEN = 256  # characters, of those that are looked at
_PROMPTS_END = 32  # tokens of a prompt, among which reasoning may be opened
_MOST_KEPT = 64  # sets of stop texts, whose ids are kept
USED = ("default", "tool_use")  # of a model's chat templates: the second one for conversations with tools
_NAMED = re.compile(r"(bos|eos|pad|unk|sep|cls|mask)_token")
_AGAIN = "Download that file again from the source of the model."
_REASONING = ("reasoning_content", "thinking", "reasoning")  # what templates call it; the first is ours


def fingerprint(directory: Path) -> str:
    """Return a hash of everything that decides which ids a text has: vocabulary, merges, normalisation, special tokens and chat
    template. Two parts of a run whose fingerprints differ must not exchange ids."""
    config = _read(directory / "tokenizer_config.json", required=False)
    templates = _templates(directory, config)
    parts = [
        json.dumps(_read(directory / "tokenizer.json"), sort_keys=True),
        json.dumps({key: _text(config.get(key)) for key in ("bos_token", "eos_token", "pad_token")}),
        *([templates[name] for name in USED if name in templates] or [""]),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class ChatTokenizer:
    """Messages to ids and ids to messages, for one model directory. `today`: the date for a chat template that asks for it, as
    2026-01-31; "": the day on which this object is made."""

    def __init__(self, directory: Path, today: str = "") -> None:
        self.directory = directory
        config = _read(directory / "tokenizer_config.json", required=False)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"the model directory {directory} has no tokenizer.json.",
                remedy="Save a fast tokenizer there: AutoTokenizer.from_pretrained(model).save_pretrained(directory)",
            )
        self._tokenizer = _opened(path)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._lock = threading.Lock()
        self._completing: dict[frozenset[str], tuple[int, ...]] = {}
        self.fingerprint = fingerprint(directory)
        self.eos = _text(config.get("eos_token"))
        self.special = _special(config, _read(directory / "special_tokens_map.json", required=False))
        self._today = today or date.today().isoformat()
        self._sources = _templates(directory, config)
        self.template = self._sources.get("default")
        self._messages = DroppedMessages(f"the chat template of {directory.name}")

    @property
    def vocabulary(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> Tokens:
        """Return the ids of a text. Raises UnicodeEncodeError for half of a surrogate pair."""
        from atropos_core.rollouts.control_tokens import ids_of

        return ids_of(self._tokenizer, text)

    def decode(self, ids: Tokens, *, keep_special: bool = False) -> str:
        """Return the text of these ids, without the tokens that frame a conversation unless `keep_special`."""
        return self._decode(ids.tolist()) if keep_special else self._replies.text(ids.tolist())

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    @property
    def has_end(self) -> bool:
        """True if the model has a token that ends a reply."""
        return bool(self._replies.ends)

    def is_end(self, number: int) -> bool:
        """Return True for the id of a token that ends a reply."""
        return number in self._replies.ends

    @functools.cached_property
    def _replies(self) -> ReplyReader:
        """The reader of replies. Special tokens are those that tokenizer.json marks, that the configuration names, or that the chat
        template puts after a reply, which a tokenizer need not mark. The generation config has the ends, also for engines."""
        added = {int(number): token for number, token in self._tokenizer.get_added_tokens_decoder().items()}
        texts = [token.content for token in added.values()]
        all_are_marked = all(token.special for token in added.values())
        named = {"" if all_are_marked else self._end_of_turn(texts)}.union(
            *(
                _named(_read(self.directory / f"{name}.json", required=False))
                for name in ("tokenizer_config", "special_tokens_map")
            )
        )
        special = {number: token.content for number, token in added.items() if token.special or token.content in named}
        ends = [self._tokenizer.token_to_id(self.eos) if self.eos else None]
        for name in ("generation_config", "config"):
            given = _read(self.directory / f"{name}.json", required=False).get("eos_token_id")
            ends += given if isinstance(given, list) else [given]
        known = {number: self._tokenizer.id_to_token(number) for number in ends if isinstance(number, int)}
        return ReplyReader(special, {number: text for number, text in known.items() if text is not None}, self._decode)

    @functools.cached_property
    def _control_tokens(self) -> ControlTokens:
        """Special tokens, and those that the template writes around messages, except those that replies are parsed by."""
        from atropos_core.rollouts.control_tokens import ControlTokens

        texts = set(self._replies.special.values())
        if others := {token.content for token in self._tokenizer.get_added_tokens_decoder().values()} - texts:
            said = [{"role": role, "content": "."} for role in ("user", "assistant", "user")]
            with contextlib.suppress(ConfigError, DataError):
                framed = self._render(said, None, prompt=True)
                texts |= {text for text in others if text in framed}
        return ControlTokens(texts - IN_HISTORIES, _read(self.directory / "tokenizer.json"), IN_HISTORIES)

    def control_token_in(self, messages: Sequence[Message]) -> str:
        """Return the first control token in the text of messages; empty if there is none."""
        return self._control_tokens.found(list(messages))

    @property
    def dropped(self) -> set[str]:
        """Return the special tokens that replies do not show."""
        return set(self._replies.special.values()) - READ

    def _end_of_turn(self, added: Sequence[str]) -> str:
        said = [{"role": "user", "content": "."}, {"role": "assistant", "content": SENTINEL}]
        try:
            return end_of_turn(self._render(said, None, prompt=False), added)
        except (ConfigError, DataError):
            return ""  # no template, or none for this: render() says so to those who need one

    def completing_ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Return the tokens that can complete one of these texts: they contain it, or begin with an end of it. Special tokens and
        those that end a turn are left out. Takes a second the first time."""
        with self._lock:  # callers may be in threads
            return self._completing_ids(frozenset(texts))

    def _completing_ids(self, texts: frozenset[str]) -> tuple[int, ...]:
        known = self._completing.get(texts)
        if known is None:
            ends = {text[at:] for text in texts for at in range(max(1, len(text) - _LONGEST_TOKEN), len(text))}
            part = not all(text.isascii() for text in texts)  # of a character: such a token says U+FFFD
            known = tuple(
                token
                for token, said in self._texts
                if any(text in said for text in texts)
                or (part and said.startswith("\ufffd"))
                or any(one[:size] in ends for one in {said, said.lstrip()} for size in range(1, len(one) + 1))
            )
            if len(self._completing) >= _MOST_KEPT:
                self._completing.clear()
            self._completing[texts] = known
        return known

    @functools.cached_property
    def _texts(self) -> list[tuple[int, str]]:
        """Return the text that each ordinary token adds after another one."""
        others = {*self._replies.special, *self._replies.ends}
        ids = [number for number in self._tokenizer.get_vocab().values() if number not in others]
        before = self._tokenizer.encode(
            "a", add_special_tokens=False
        ).ids  # some decoders drop a space that begins a text
        start = len(self._tokenizer.decode(before, skip_special_tokens=False))
        whole = self._tokenizer.decode_batch([[*before, number] for number in ids], skip_special_tokens=False)
        return [(number, text[start:]) for number, text in zip(ids, whole, strict=True)]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        reply_follows: bool = True,
    ) -> Tokens:
        """Return the ids of the conversation, ready for the assistant's reply, or whole. Control tokens in messages are treated as
        text. Raises MessageDropped if the chat template leaves out a message or the tools."""

        def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
            return self._render(messages, tools, prompt=reply_follows)

        marked, schemas = self.marked(messages), self.marked(tools or ())
        text = render(marked, schemas)
        self._messages.check(marked, schemas, text, render, ("whole", reply_follows))
        return self.encode_marked(text)

    def marked(self, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Mark messages or tools before they are rendered, so that `encode_marked` can tell their text from the template's control tokens.
        Raises DataError."""
        try:
            return [self._control_tokens.marked(value) for value in values]
        except RecursionError:
            raise DataError(
                "these messages or tools are nested too deep to be rendered.", remedy="Send flatter ones."
            ) from None

    def encode_marked(self, text: str) -> Tokens:
        """Return the ids of a text that was rendered from `marked` messages."""
        return self._control_tokens.encode(text, self.encode)

    def extend(
        self, messages: Sequence[Message], history: Tokens, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Tokens:
        """Return the ids that follow `history` (which ends in sampled tokens) when `messages` come next. Raises MessageDropped if the
        chat template leaves one of these out."""
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": SENTINEL}]
        schemas = self.marked(tools or ())

        def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
            _, found, tail = self._render([*before, *messages], tools, prompt=True).partition(SENTINEL)
            if not found:
                raise DataError(
                    "this model's chat template rewrites earlier replies, so a rollout cannot be extended: start a new rollout."
                )
            return tail

        marked = self.marked(messages)
        tail = render(marked, schemas)
        # The tools are in the history: what follows it need not show them.
        self._messages.check(
            marked, (), tail, lambda messages, _: render(messages, schemas), ("next", bool(schemas)), before="assistant"
        )
        if (end := self._replies.end(history[-1:].tolist())) and tail.lstrip().startswith(end):
            tail = tail.lstrip().removeprefix(end)  # the policy has sampled it already
        return self.encode_marked(tail)

    def parse(self, ids: Tokens, prompt: Tokens | None = None) -> Message:
        """Parse sampled ids into an assistant message. `prompt`: the ids before them, which may end in an open `<think>`."""
        if prompt is None:
            return message_of(self.decode(ids))
        return message_of(self._replies.text(ids.tolist(), prompt[-_PROMPTS_END:].tolist()), self.opening(prompt))

    def opening(self, prompt: Tokens) -> str:
        """Return the thinking tag that these ids end with, or nothing."""
        return opening_of(self._decode(prompt[-_PROMPTS_END:].tolist()))

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, prompt: bool) -> str:
        with_tools = bool(tools) and "tool_use" in self._sources
        template = self._chat_templates["tool_use" if with_tools else "default"]
        return template.render(
            messages=[with_reasoning(message) for message in messages],
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=prompt,
            **self.special,
        )

    @functools.cached_property
    def _chat_templates(self) -> Mapping[str, ChatTemplate]:
        from atropos_core.rollouts.chat_template import ChatTemplate

        sources = {"default": None, **{name: source for name, source in self._sources.items() if name in USED}}
        return {name: ChatTemplate(source, self.directory, self._today) for name, source in sources.items()}


def with_reasoning(message: Message) -> dict[str, Any]:
    """Return the message with its reasoning under each of the names that templates use."""
    said = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return dict(message) if said is None else {"thinking": said, **message, "reasoning_content": said}


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a model by name, found as transformers finds them. Most have only `default`. Raises ConfigError."""
    found = config.get("chat_template") or {}
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    made = {"default": found} if isinstance(found, str) else found
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in (directory / "additional_chat_templates").glob("*.jinja")}
    try:
        made = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()} or made
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a chat template of {directory} cannot be read: {error}.") from error
    if not isinstance(made, dict) or not all(isinstance(text, str) for pair in made.items() for text in pair):
        raise ConfigError(
            f"chat_template in {directory / 'tokenizer_config.json'} is neither a text nor texts by name.",
            remedy=_AGAIN,
        )
    return made


def _special(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by their names in a template. `other`: the file in which older tokenizers name them."""
    more = config.get("extra_special_tokens")
    given = {**other, **config, **(more if isinstance(more, dict) else {})}
    named = {key: value for key, value in given.items() if key.endswith("_token") or key in (more or ())}
    return {key: _text(value) for key, value in named.items() if isinstance(value, str | dict)}


def _read(path: Path, *, required: bool = True) -> dict[str, Any]:
    try:
        return json_object(path)
    except FileNotFoundError:
        if required:
            raise ConfigError(f"there is no {path.name} in {path.parent}.") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path!s:.300} cannot be read: {error.strerror}.", remedy=_AGAIN) from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}.", remedy=_AGAIN) from error


def _opened(path: Path) -> Tokenizer:
    """Open a tokenizer file. Raises ConfigError if it is not one."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(read_text(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", remedy=_AGAIN) from error
    except Exception as error:  # tokenizers raises no narrower one
        raise ConfigError(f"{path} is not a tokenizer: {error!s:.300}.", remedy=_AGAIN) from error


def _named(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens that a tokenizer's configuration names."""
    more = [*(config.get("additional_special_tokens") or ()), *(config.get("extra_special_tokens") or ())]
    if isinstance(config.get("extra_special_tokens"), dict):
        more = list(config["extra_special_tokens"].values())
    one = [value for key, value in config.items() if _NAMED.fullmatch(key)]
    return [_text(token) for token in [*one, *more]]


def _text(token: Any) -> str:
    """Return a token's text. Raises ConfigError for anything else."""
    text = token.get("content") if isinstance(token, dict) else token or ""
    if not isinstance(text, str):
        raise ConfigError(
            f"a special token of the model's tokenizer is {token!r:.100}, not a text.",
            remedy=f"{_AGAIN} It is in tokenizer_config.json or special_tokens_map.json.",
        )
    return text
