"""A chat template is a program that came with a model: whatever it is, it ends, with a text or a named error."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from atropos_core.errors import ConfigError, DataError
from atropos_core.rollouts.chat_template import MOST_TURNS, ChatTemplate

MODEL = Path("some-model")
ENDLESS = {
    "nested loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "turns"),
    "a loop over what a macro makes": ("{% macro f() %}{% for i in range(9999) %}{% endfor %}{% endmacro %}"
        "{% for i in range(9999) %}{{ f() }}{% endfor %}", "turns"),
    "a filtered loop": ("{% for i in range(99999) if i > 0 %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}", "turns"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "Recursion"),
    "a loop that calls itself": ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", "Recursion"),
    "a text that doubles": ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "characters"),
    "a sum that doubles": ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "characters"),
    "a text times a number": ("{{ 'x' * 99999999999 }}", "repeats"),
    "a list times a number": ("{{ (['x'] * 99999999999) | length }}", "repeats"),
    "a power of a power": ("{{ 99 ** 99999999 }}", "power"),
    "a padded text": ("{{ 'x'.center(99999999999) }}", "pads"),
    "a padding filter": ("{{ 'x' | center(99999999999) }}", "pads"),
    "a padding format": ("{{ '%99999999999d' % 1 }}", "pads"),
    "another padding format": ("{{ '{:99999999999}'.format(1) }}", "pads"),
    "a format filter": ("{{ '%99999999999d' | format(1) }}", "pads"),
    "a long range": ("{{ range(99999999999) | list }}", "Range too big"),
    "an unknown name": ("{{ messages[7].content.nothing() }}", "refuses these messages"),
    "a division by zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("what", ENDLESS)
def test_a_template_that_would_not_end_is_refused_by_name(what: str) -> None:
    source, named = ENDLESS[what]
    template = ChatTemplate(source, MODEL)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="the chat template of some-model refuses these messages") as refused:
            template.render(messages=[])
        assert named in str(refused.value)
        assert tracemalloc.get_traced_memory()[1] < 1 << 29
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source", [None, "{% for %}", "{{ 'x' | no_such_filter }}", "{{ " + "(" * 5000 + ")" * 5000 + " }}"]
)
def test_what_is_no_template_is_refused_when_it_is_read(source: str | None) -> None:
    with pytest.raises(ConfigError, match="some-model"):
        ChatTemplate(source, MODEL)


def test_loops_have_all_that_they_had() -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}"
        "{{ loop.previtem.role if loop.previtem }}{{ m.role ~ ':' ~ m.content }}{% if loop.index == 3 %}{% break %}{% endif %}"
        "{% else %}none{% endfor %}{% for key, value in {'a': 1}.items() %}{{ key }}{{ value }}{% endfor %}"
        "{% for i in range(3) recursive %}{{ i }}{% if i == 1 %}{{ loop([7]) }}{% endif %}{% endfor %}"
        "{{ '%s-%d' % ('x', 3) }}{{ 2 ** 3 }}{{ 'ab' * 2 }}{{ [1] + [2] }}{{ 'x' | center(5) }}{{ '{}!'.format('y') }}"
    )
    rendered = ChatTemplate(source, MODEL).render(
        messages=[{"role": role, "content": "c"} for role in ("system", "user", "assistant")]
    )
    assert rendered == "1/2TrueFalseuser:c2/2FalseTrueuserassistant:ca10172x-38abab[1, 2]  x  y!"


def test_a_long_conversation_is_far_from_the_bounds() -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": [{"text": "word " * 100}] * 20} for _ in range(2000)]
    assert len(ChatTemplate(source, MODEL).render(messages=messages)) == 2000 * 20 * 500
    assert MOST_TURNS > 20 * 2000 * 21
