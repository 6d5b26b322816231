"""The process that renders chat templates: `python -m atropos_core.rollouts.template_process CPU_S`, with CPU time for each call in
seconds. `chat_template.py` starts it and calls it, over the socket that is its standard input.

A template is a program that came with a model. It is compiled and rendered as transformers does it (`utils/chat_template_utils.py`
there). The kernel ends this process if one call takes too much CPU time, and refuses memory beyond a bound.
"""

from __future__ import annotations

import datetime
import functools
import json
import marshal
import random
import re
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from atropos_core.rollouts.template_calls import (
    MARK,
    MEMORY_BYTES,
    REFUSED,
    RENDERED,
    TOO_MUCH,
    UNREADABLE,
    receive,
    send,
)

# The largest text that a template may make: MOST_ADDED characters, and MOST_TIMES for each byte of the call. (JSON in ASCII writes up to 12
# for one character.)
MOST_ADDED, MOST_TIMES = 1 << 20, 16
MOST_SAID = 2000  # characters of an error
# JSON in ASCII keeps marks. Two marks stand for one in the message: one of them is escaped.
ESCAPED_MARK = re.compile(r"(?<!\\)((?:\\\\)*)((?:\\u303f){1,2})")
COMPILED = 16  # templates that are kept


def main() -> None:
    connection, cpu_s = socket.socket(fileno=0), float(sys.argv[1])
    prepare()
    while (call := receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        kind, text = answer(call)
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            send(connection, bytes([kind]) + text.encode("utf-8", "surrogatepass"))
        except (BrokenPipeError, ConnectionResetError):
            return  # the parent has ended, for a Ctrl-C for example
        if kind == TOO_MUCH:
            return  # the next call gets a process with all of its memory


def prepare() -> None:
    """Set the signals and limits of this process. Only a closed connection or a limit ends it: a Ctrl-C is for its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    warnings.simplefilter("ignore")  # of the code that templates are compiled to
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory()


def limit_memory() -> None:
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
    except OSError:  # not Linux: what it has now is not known, and little
        pages = 0
    most = pages * resource.getpagesize() + MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def answer(call: bytes) -> tuple[int, str]:
    """Answer a call: the template's source, the date for today, and its values, or None to only compile it."""
    try:
        source, day, values = marshal.loads(call)
        try:
            template = compiled(source, day)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            return UNREADABLE, said(error)
        if values is None:
            return RENDERED, ""
        random.seed(0)  # the same conversation is rendered the same each time
        text = template.render(**values)
        most = MOST_ADDED + MOST_TIMES * len(call)
        if len(text) > most:
            return (
                TOO_MUCH,
                f"it makes a text of {len(text):,} characters, and {most:,} are the most for these messages",
            )
        return RENDERED, text
    except MemoryError:
        return TOO_MUCH, f"it takes more than {MEMORY_BYTES / 1e9:.1f} GB of memory"
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return REFUSED, said(error)


def said(error: Exception) -> str:
    try:
        text = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        if isinstance(error, TemplateSyntaxError):
            text = f"{error.message} (line {error.lineno})"
    except Exception:  # noqa: BLE001 - its own text may be what fails
        text = type(error).__name__
    return text[:MOST_SAID]


@functools.lru_cache(COMPILED)
def compiled(source: str, day: str) -> Template:
    today = datetime.datetime.fromisoformat(day)

    def strftime_now(format: str) -> str:
        return today.strftime(format)

    return environment().from_string(source, globals={"strftime_now": strftime_now})


@functools.cache
def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that transformers gives a chat template."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals |= {"raise_exception": raise_exception, "dict": PlainDict(), "namespace": PlainNamespace}
    return made


class GenerationTag(Extension):
    """`{% generation %}` around the assistant's text: a block with a new scope. Only its text matters here, because sampling already
    tells which tokens are trained."""

    tags = {"generation"}  # noqa: RUF012 - as its base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        text: str = caller()
        return text


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return ESCAPED_MARK.sub(lambda found: found[1] + (found[2][6:] or MARK), text) if ensure_ascii else text


def raise_exception(message: str) -> None:
    raise TemplateError(message)


class PlainDict:
    """`dict` without the attributes of the type."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class PlainNamespace(Namespace):
    """`namespace` without attributes that begin with an underscore."""

    def __init__(*given: Any, **named: Any) -> None:  # so that `namespace(self=1)` works
        self, *rest = given
        values: Mapping[str, Any] = dict(*rest, **named)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have {name!r}: rename what begins with an underscore")


if __name__ == "__main__":
    main()
