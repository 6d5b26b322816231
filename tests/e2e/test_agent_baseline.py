"""A model elsewhere in the policy's place, by `atropos eval`: its answers are what is scored, and the policy is never called."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.e2e.runs import finish

pytestmark = pytest.mark.slow

AGENT = """
import json, os, urllib.request
task = json.load(open(os.environ["ATROPOS_TASK_FILE"]))
assert "SECRET" not in json.dumps(dict(os.environ))
body = json.dumps({"model": "any", "messages": task["messages"]}).encode()
key = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""


class Elsewhere(BaseHTTPRequestHandler):
    """Somebody's server: adds two numbers, and is wrong about those above 5."""

    seen: ClassVar[list[tuple[str, str | None, dict[str, object]]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((self.path, self.headers["authorization"], body))
        total = sum(int(one) for one in body["messages"][-1]["content"].split("+"))
        said = {"role": "assistant", "content": str(total if total <= 5 else 0)}
        answer = {"id": "a", "choices": [{"message": said, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None: ...


@pytest.fixture
def elsewhere() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_baseline_is_evaluated_with_the_same_programs_tasks_and_rewards(
    tmp_path: Path, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "SECRET")
    sums = [(a, b) for a in range(2, 5) for b in range(2)]  # of which one is above 4, none above 5
    sums += [(5, 1), (5, 2)]
    lines = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in sums]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "agent.py").write_text(AGENT)
    values = {
        "command": ["{python}", "-S", str(tmp_path / "agent.py")], "sandbox": "process", "network": True,
        "tasks": str(tmp_path / "tasks.jsonl"), "test_tasks": str(tmp_path / "tasks.jsonl"), "reward.plugin": "exact",
        "baseline.url": elsewhere, "baseline.model": "theirs", "baseline.key_variable": "THEIR_KEY",
    }  # fmt: skip
    changes = [
        word for name, value in values.items() for word in ("--set", f"environment.agent.{name}={json.dumps(value)}")
    ]
    out = tmp_path / "out"
    finish(
        tmp_path / "unused", "eval", "--env", "agent", "--model", "tiny", "--problems", "8", "--out", str(out), *changes
    )
    metrics = json.loads(out.with_suffix(".json").read_text())["metrics"]
    assert metrics["eval/reward"] == 6 / 8, "what the model elsewhere knows"
    assert metrics["eval/agent/baseline_tokens"] == 1.0
    assert len(Elsewhere.seen) == 8
    for path, key, body in Elsewhere.seen:
        assert (path, key, body["model"], body["temperature"]) == (
            "/v1/chat/completions",
            "Bearer SECRET",
            "theirs",
            0.0,
        )
