"""A chat template is a program that came with a model: whatever it is, it ends, with a text or a named error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from atropos_core.errors import ConfigError, DataError, WorkerLost
from atropos_core.rollouts.chat_template import ChatTemplate, Renderer
from atropos_core.rollouts.template_calls import MEMORY_BYTES

MODEL = Path("some-model")
TIME, MEMORY, TEXT = "of CPU time", "of memory", "characters"
EITHER = f"{TIME}|{MEMORY}"
ENDLESS = {
    "nested loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME),
    "a macro that doubles": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", TIME),
    "a recursive loop that doubles": ("{% for n in [60] recursive %}{% if n %}{{ loop([n - 1, n - 1]) }}{% endif %}{% endfor %}", TIME),
    "a number that is squared": ("{% set s = namespace(x=7) %}{% for i in range(99) %}{% set s.x = s.x * s.x %}{% endfor %}", TIME),
    "a power of a power": ("{{ 99 ** 99999999 }}", TIME),
    "many words": ("{{ lipsum(n=10**7) | length }}", TIME),
    "a name that was ours": ("{% set _turns = range %}{% for i in range(99999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", TIME),
    "a filter of filters": ("{% set s = namespace(x='<') %}{% for i in range(99) %}{% set s.x = s.x | e ~ s.x %}{% endfor %}", EITHER),
    "a text that doubles": ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", EITHER),
    "a list that doubles": ("{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", EITHER),
    "a block that doubles": ("{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40, EITHER),
    "a replacement": ("{{ ('x' * 99999).replace('x', 'y' * 99999) | length }}", EITHER),
    "a text times a number": ("{{ 'x' * 99999999999 }}", MEMORY),
    "a list times a number": ("{{ (['x'] * 99999999999) | length }}", MEMORY),
    "a padded text": ("{{ 'x'.center(99999999999) }}", MEMORY),
    "a padding filter": ("{{ 'x' | center(99999999999) }}", MEMORY),
    "a padding format": ("{{ '%9999999999d' % 1 }}", f"OverflowError|{MEMORY}"),
    "another padding format": ("{{ '{:99999999999}'.format(1) }}", MEMORY),
    "an indented list": ("{{ range(9999) | list | tojson(indent=99999) | length }}", EITHER),
    "a joined list": ("{{ (['x' * 99999] * 99999) | join | length }}", EITHER),
    "a long date": ("{{ strftime_now('%Y' * 99999999) | length }}", EITHER),
    "a text that is too long": ("{{ 'x' * 1999999 }}", TEXT),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "a loop that calls itself": ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", "RecursionError"),
    "a long range": ("{{ range(99999999999) | list }}", "Range too big"),
    "an unknown name": ("{{ messages[7].content.nothing() }}", "refuses these messages"),
    "a division by zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "a way out": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "a namespace with private names": ("{% set n = namespace() %}{% set n['__class__'] = 1 %}", "cannot be read|cannot have"),
}  # fmt: skip


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    """As any other, but it has less time: what never ends takes all of it."""
    made = Renderer(cpu_s=0.05)
    yield made
    made.close()


@pytest.mark.parametrize("what", ENDLESS)
def test_a_template_that_would_not_end_is_refused_by_name(what: str, renderer: Renderer) -> None:
    source, named = ENDLESS[what]
    with pytest.raises((DataError, ConfigError), match=named) as refused:
        ChatTemplate(source, MODEL, renderer=renderer).render(messages=[])
    assert "some-model" in str(refused.value)
    assert ChatTemplate("{{ 1 + 1 }}", MODEL, renderer=renderer).render() == "2", "the next one is rendered"


def test_a_template_that_behaves_at_first_is_ended_later(renderer: Renderer) -> None:
    source = "{% for m in messages %}{% for i in range(m.content | int) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x{% endfor %}"
    template = ChatTemplate(source, MODEL, renderer=renderer)
    assert template.render(messages=[{"content": "0"}]) == "x"
    for _ in range(2):
        with pytest.raises(DataError, match=TIME):
            template.render(messages=[{"content": "99999"}])
        assert template.render(messages=[{"content": "0"}]) == "x"


@pytest.mark.parametrize(
    "source", [None, "{% for %}", "{{ 'x' | no_such_filter }}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% generation %}"]
)  # fmt: skip
def test_what_is_no_template_is_refused_when_it_is_read(source: str | None) -> None:
    with pytest.raises(ConfigError, match="some-model"):
        ChatTemplate(source, MODEL)


def test_a_constant_that_would_not_end_is_refused_when_it_is_read(renderer: Renderer) -> None:
    with pytest.raises((ConfigError, DataError), match=EITHER):
        ChatTemplate("{{ 'x' | center(99999999999) | length }}", MODEL, renderer=renderer).render()


def test_a_long_conversation_is_far_from_the_bounds() -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": [{"text": "word " * 100}] * 20} for _ in range(1000)]
    assert len(ChatTemplate(source, MODEL).render(messages=messages)) == 1000 * 20 * 500


def test_values_that_are_not_json_are_refused_by_name() -> None:
    template = ChatTemplate("{{ messages }}", MODEL)
    with pytest.raises(DataError, match="of type object"):
        template.render(messages=[{"content": object()}])
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(DataError, match="nested too deep"):
        template.render(messages=deep)
    assert template.render(messages=[("é\ud800", 1.5, True, None)]) == "[('é\\ud800', 1.5, True, None)]"


FEATURES = {
    "loop controls": "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}"
    "{{ loop.previtem.role if loop.previtem }}{{ m.role ~ ':' ~ m.content }}{% if loop.index == 3 %}{% break %}{% endif %}"
    "{% if loop.index0 %}{% continue %}{% endif %}-{% else %}none{% endfor %}",
    "recursive loops": "{% for i in range(3) recursive %}{{ i }}{% if i == 1 %}{{ loop([7]) }}{% endif %}{% endfor %}",
    "operators": "{{ '%s-%d' % ('x', 3) }}{{ 2 ** 3 }}{{ 'ab' * 2 }}{{ [1] + [2] }}{{ 'x' | center(5) }}{{ '{}!'.format('y') }}",
    "the date": "{{ strftime_now('%d %b %Y') }}|{{ strftime_now(format='%A %j') }}",
    "whether there is a date": "{% if strftime_now is defined %}{% set d = strftime_now('%Y-%m-%d') %}{{ d }}{% endif %}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}\n{% endgeneration %}\n"
    "{{ x }}{% endfor %}",
    "generation, trimmed": "a \n  {%- generation -%}\n b {{ messages[0].content }} \n{%- endgeneration -%}\n c",
    "generation in a macro": "{% macro f(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}{{ f(messages[0]) }}",
    "tojson": "{% for t in tools %}{{ t | tojson }}{% endfor %}",
    "tojson with separators": "{{ tools | tojson(separators=(',', ':')) }}{{ tools | tojson(separators=[',', ': ']) }}",
    "tojson with indent": "{{ tools | tojson(indent=4) }}{{ tools | tojson(indent='\t') }}{{ tools | tojson(indent=None) }}",
    "tojson in another order": "{{ tools | tojson(sort_keys=true) }}",
    "tojson in ASCII": "{{ tools | tojson(ensure_ascii=True) }}{{ tools | tojson(True) }}",
    "tojson by places": "{{ tools | tojson(False, 2, (',', ': '), True) }}",
    "tojson of markup": "{{ '<a & \"b\">' | tojson }}{{ {'x': 1.0, 2: none} | tojson }}",
    "exceptions": "{{ raise_exception('no system ' ~ messages[0].role) }}",
    "namespaces": "{% set n = namespace(a=1, self=2) %}{% set n.a = 3 %}{{ n.a }}{{ n.self }}"
    "{% set m = namespace({'k': 4}, b=5) %}{{ m.k }}{{ m.b }}",
    "private names": "{% set n = namespace(_a=1) %}{{ n._a }}",
    "dicts": "{{ dict(a=1, b=2) }}{{ dict([('k', 1)]) }}{{ dict.fromkeys(['a'], 0) }}"
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
    "an attribute of dict": "{{ dict.__mro__ }}{{ dict.pop }}",
    "whitespace": "  {% if true %}  \n  x\n  {% endif %}\n  {#- c -#}\n y \n{% raw %}{{ }}{% endraw %}\n",
    "what is undefined": "{{ nothing }}{{ messages[0].nothing }}{{ nothing is defined }}{{ documents is none }}",
    "an attribute of nothing": "{{ nothing.more }}",
    "changes": "{{ messages.append(1) }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}",
    "tests and filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}"
    "{{ messages[-1] is mapping }}{{ messages is iterable }}{{ 'a\nb' | indent }}{{ '  x ' | trim }}{{ tools is sequence }}"
    "{{ messages | map(attribute='role') | unique | list }}{{ 'x' | default('y') }}{{ [3, 1] | sort }}"
    "{{ none | default('y', true) }}{{ [1, 2, 3] | batch(2) | list }}",
    "macros": "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller is defined }}{% endmacro %}{{ f(1, 3, 4, c=5) }}"
    "{% call f(1) %}{% endcall %}{% set g = f %}{{ g(9) }}",
    "globals": "{{ range(3) | list }}{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner() %}{{ j() }}{{ j() }}",
    "other tags": "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}"
    "{% with y = 1 %}{{ y }}{% endwith %}{% block b %}c{% endblock %}",
    "a tag that there is not": "{% do 1 %}",
    "markup": "{{ '<b>' | e }}{{ '<b>' }}{{ '<i>' | safe }}{{ '<b>' | escape ~ '<' }}",
}  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind, é."},
    {"role": "user", "content": " What?\n"},
    {"role": "assistant", "content": "", "reasoning_content": "hm",
     "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "é"]}}}]},
    {"role": "tool", "content": "7", "name": "f"},
    {"role": "assistant", "content": "7", "reasoning": "so"},
]  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "é <x>", "parameters": {"z": 1, "a": {"type": "object"}}},
    }
]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_template_renders_as_transformers_renders_it(feature: str) -> None:
    from tests.same_rendering import ours, theirs

    values: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "add_generation_prompt": True, "bos_token": "<s>"}
    assert ours(FEATURES[feature], values) == theirs(FEATURES[feature], values)


def test_the_date_is_the_one_that_was_given_and_chance_gives_the_same_twice() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y, %H:%M') }} {{ range(9999) | random }}", MODEL, "2024-02-29")
    assert template.render().startswith("29 February 2024, 00:00 ")
    assert template.render() == template.render()


PARENT = """
    import os, sys, time
    from pathlib import Path
    from atropos_core.rollouts.chat_template import ChatTemplate, Renderer, _of_this_process
    renderer = RENDERER
    source = "{% for i in range(n) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    template = ChatTemplate(source, Path("m"), renderer=renderer)
    print(renderer._popen.pid, flush=True)
"""


def parent(then: str = "", renderer: str = "_of_this_process") -> str:
    return textwrap.dedent(PARENT).replace("RENDERER", renderer) + textwrap.dedent(then)


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def ends_within(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.parametrize(
    "program",
    [
        parent("time.sleep(60)"),
        parent("template.render(n=99999)", "Renderer(cpu_s=0.2)"),
        parent("os.fork() or time.sleep(60); time.sleep(60)"),
    ],
    ids=["idle", "rendering", "forked"],
)
def test_no_process_is_left_once_its_parent_was_killed(program: str) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        time.sleep(0.1)
        assert alive(pid)
        started.kill()
        started.wait(30)
        try:
            assert ends_within(pid, 30), "also while it renders, and while another process was forked from its parent"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


def test_a_process_that_ends_has_ended_its_own() -> None:
    ended = subprocess.run([sys.executable, "-c", parent()], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not alive(int(ended.stdout))


def test_a_killed_process_is_named_and_replaced(renderer: Renderer) -> None:
    template = ChatTemplate("{{ n }}", MODEL, renderer=renderer)
    assert renderer._popen is not None
    os.kill(renderer._popen.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="exit code -9"):
        template.render(n=1)
    assert template.render(n=2) == "2"


def test_threads_and_forks_get_their_own_answers() -> None:
    template = ChatTemplate("{% for i in range(99) %}{{ n }}{% endfor %}", MODEL)
    wrong: list[int] = []

    def many(number: int) -> None:
        wrong.extend(n for n in range(50) if template.render(n=f"{number}-{n};") != f"{number}-{n};" * 99)

    threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    program = parent("""
        pid = os.fork()
        assert all(template.render(n=0) == "x" for _ in range(99))
        if pid == 0:
            renderer.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0 and template.render(n=0) == "x"
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_interrupted_call_does_not_answer_the_next(renderer: Renderer) -> None:
    class Rung(Exception):
        pass

    def ring(*_: object) -> None:
        raise Rung

    slow = ChatTemplate(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x", MODEL, renderer=renderer
    )
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Rung):
            slow.render()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ChatTemplate("{{ 3 }}", MODEL, renderer=renderer).render() == "3"


@pytest.mark.cold
def test_the_memory_that_is_bounded_is_that_of_the_process(renderer: Renderer) -> None:
    ChatTemplate("{{ 1 }}", MODEL, renderer=renderer).render()
    assert renderer._popen is not None
    limit = next(
        line for line in Path(f"/proc/{renderer._popen.pid}/limits").read_text().splitlines() if "address space" in line
    )
    assert MEMORY_BYTES < int(limit.split()[3]) < 4 * MEMORY_BYTES
