"""docs/agent-api.md: its tables are those of the code, and its bounds the server's."""

from __future__ import annotations

import re

import pytest

from atropos_agent_api.dialects import chat, completions, messages, responses, values
from atropos_agent_api.server import app, hints, requests, running
from atropos_agent_api.sessions import limits
from atropos_http_server import connection_limits
from tests.conftest import REPOSITORY
from tools.make_agent_api_tables import page

PAGE = (REPOSITORY / "docs/agent-api.md").read_text()


def test_the_tables_of_fields_are_those_of_the_code():
    assert page(PAGE) == PAGE, "python tools/make_agent_api_tables.py"


def test_every_call_is_in_the_first_table_and_no_other():
    named = set(re.findall(r"`POST (/v1/[\w/]+)`", PAGE))
    assert named == {*app.CALLS, app.COUNT}


@pytest.mark.parametrize(
    ("said", "bound"),
    [
        (r"to read some of its answer \| (\d+) s each", running.REQUEST_S),
        (r"body, gzip or plain \| (\d+) MB", running.BODY_BYTES / 1e6),
        (r"head \| (\d+) kB and \d+ lines", connection_limits.HEAD_BYTES / 1024),
        (r"head \| \d+ kB and (\d+) lines", connection_limits.HEAD_LINES),
        (r"connections, [^|]+ \| (\d+) \|", running.CONNECTIONS),
        (r"of which a call (\d+) MB", requests.CALL_BYTES / 1e6),
        (r"characters, or (\d+) for each token", limits.TOKEN_CHARACTERS),
        (r"before it is rendered \| (\d+),000,000 characters", limits.MOST_CHARACTERS / 1e6),
        (r"levels of values of a call \(else 400\) \| (\d+)", requests.MOST_DEPTH),
        (r"all bodies [^|]+ \| (\d+) MB", running.IN_FLIGHT_BYTES / 1e6),
        (r"nesting of values [^|]+ \| (\d+) \|", values.DEEPEST),
        (r"(\d+) characters of each", hints.MOST_CHARACTERS),
    ],
)
def test_a_bound_on_the_page_is_the_servers(said: str, bound: float):
    [found] = re.findall(said, PAGE)
    assert float(found) == bound


def test_a_comment_every_ten_seconds_and_ten_minutes_of_silence():
    assert "every ten seconds" in PAGE and app.KEEP_ALIVE_S == 10
    assert "since a tool may take long | ten minutes |" in PAGE and running.KEPT_ALIVE_S == 600


def test_every_field_of_the_sdks_is_in_a_table():
    """Fields that OpenAI's and Anthropic's SDKs can send are refused on purpose, not because they were forgotten."""
    from anthropic.types import message_create_params
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params

    for fields, kind in (
        (chat.FIELDS, chat_params.CompletionCreateParamsBase),
        (completions.FIELDS, completion_create_params.CompletionCreateParamsBase),
        (responses.FIELDS, response_create_params.ResponseCreateParamsBase),
        (messages.FIELDS, message_create_params.MessageCreateParamsBase),
    ):
        table = {*fields.read, *fields.no_effect, *fields.only, *fields.sampling}
        assert not set(kind.__annotations__) - table, kind
