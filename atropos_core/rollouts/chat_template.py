"""A model's chat template, compiled so that no text in it and no conversation keeps it from ending.

A template is a program that came with a model. Jinja's sandbox keeps it from the machine; the bounds here keep it from
looping, recursing or growing without end, in the event loop that every other rollout waits for. What it renders is text;
`tokenizer.py` calls it, and makes the ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from atropos_core.errors import ConfigError, DataError

MOST_TURNS = 1_000_000  # of all loops of one rendering together; a fifth of a second. A conversation of 1,000 messages takes some 10,000
MOST_CHARACTERS = 1 << 26  # of any text that a rendering makes
MOST_WIDTH = 1_000_000  # of any number that a text is padded or repeated by
_ANY_FAULT = (
    TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    MemoryError,
    RecursionError,
)


class ChatTemplate:
    """Raises ConfigError where there is no template, or it is none."""

    def __init__(self, source: str | None, directory: Path) -> None:
        if source is None:
            raise ConfigError(
                f"the model {directory.name} has no chat template, so a conversation cannot be rendered for it.",
                remedy="Add a chat_template.jinja to its directory, or use an instruction-tuned model.",
            )
        self._name = directory.name
        try:
            self._compiled = _Bounded().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template of {directory.name} cannot be read: {error}") from error

    def render(self, **values: Any) -> str:
        """Raises DataError where the template refuses these values, fails, or passes a bound."""
        try:
            return str(self._compiled.render(_turns=_Turns(), **values))
        except _ANY_FAULT as error:
            what = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise DataError(f"the chat template of {self._name} refuses these messages: {what}") from error


class _Turns:
    """Counts the turns of all loops of one rendering."""

    def __init__(self) -> None:
        self.left = MOST_TURNS

    def __call__(self, values: Iterable[Any]) -> Any:
        return self._counted(values) if not hasattr(values, "__len__") else _Sized(values, self)

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.left -= 1
            if self.left < 0:
                raise TemplateError(f"its loops take more than {MOST_TURNS:,} turns: does one of them end?")
            yield value


class _Sized:
    """As `_Turns` counts them; `loop.length` and the like ask for the length."""

    def __init__(self, values: Any, turns: _Turns) -> None:
        self._values, self._turns = values, turns

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return self._turns._counted(self._values)


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, indent=options.get("indent")
        )
        self.globals["raise_exception"] = _refuse
        self.globals["_joined"] = _joined
        for name in ("center", "indent", "format"):
            self.filters[name] = _narrow(self.filters[name])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            if not loop.recursive:  # those call themselves with what is inside; Python's own bound ends them
                loop.iter = nodes.Call(nodes.Name("_turns", "load"), [loop.iter], [], None, None)
        tree = cast(nodes.Template, _Joining().visit(tree))
        tree.set_environment(self)
        tree.set_lineno(1)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return _joined(left, right)
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        if operator == "%" and isinstance(left, str):
            _check_width(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *given: Any, **named: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        if isinstance(text := getattr(method, "__self__", None), str):
            _check_width(text, *given, *named.values())
        return super().call(context, function, *given, **named)


class _Joining(NodeTransformer):
    """`a ~ b` as a call that bounds what comes of it."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name("_joined", "load"), node.nodes, [], None, None)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _joined(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MOST_CHARACTERS:
        raise TemplateError(f"it makes a text of more than {MOST_CHARACTERS:,} characters")
    return "".join(texts)


def _check_product(operator: str, left: Any, right: Any) -> None:
    for value, number in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(number, int) and len(value) * number > MOST_WIDTH:
            raise TemplateError(f"it repeats something {number:,} times")
    if operator == "**" and any(isinstance(value, int) and abs(value) > 10_000 for value in (left, right)):
        raise TemplateError("it raises a number to a power that no conversation needs")


def _check_width(*given: Any) -> None:
    """Of what pads a text: numbers, and those that a format has in it."""
    for value in given:
        numbers = [value] if isinstance(value, int) else _numbers_in(value) if isinstance(value, str) else []
        if any(number > MOST_WIDTH for number in numbers) and (isinstance(value, int) or "%" in value or "{" in value):
            raise TemplateError(f"it pads a text to more than {MOST_WIDTH:,} characters")


def _numbers_in(text: str) -> list[int]:
    digits = "".join(letter if letter.isdecimal() else " " for letter in text)
    return [int(each[:19]) for each in digits.split()]


def _narrow(filter_: Callable[..., Any]) -> Callable[..., Any]:
    def narrow(*given: Any, **named: Any) -> Any:
        _check_width(*given[1:], *named.values())
        if isinstance(given[0], str) and len(given) > 1 and filter_.__name__ == "do_format":
            _check_width(given[0])
        return filter_(*given, **named)

    return narrow
