"""Take the episodes of a run with sandbox external, one after another, and run your program for each:

    python take_episodes.py http://127.0.0.1:8010 runs/.../agents/environment.agent.token your-agent

The program finds the model in OPENAI_BASE_URL and similar variables, and the task as JSON on standard input. Only the standard
library is needed: copy this file, and call your own code instead of the program.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

AWAY_S = 60  # how long a run may be away until it is resumed


def call(url: str, token: str, value: dict[str, Any]) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    request = urllib.request.Request(url, json.dumps(value).encode(), {"Authorization": f"Bearer {token}"})
    until = time.monotonic() + AWAY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(1)


def take_episodes(url: str, token: str, agent: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """`agent` returns the report of an episode's end: exit_code, output, errors, files, each of which may be left out.
    Returns the reason why there are no more episodes."""
    while True:
        status, episode = call(f"{url}/episodes/next", token, {})
        if status == 200:
            call(f"{url}/episodes/{episode['id']}/end", token, agent(episode))  # 409: it had already ended
        elif status != 204:  # 204: none yet; 410: the run has ended
            return str(episode["error"]["message"])


def run(command: list[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def agent(episode: dict[str, Any]) -> dict[str, Any]:
        there = {**os.environ, **episode["environment"]}
        try:
            ended = subprocess.run(
                command, input=json.dumps(episode["task"]), env=there, capture_output=True, text=True, timeout=episode["deadline_s"]
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"exit_code": 1}
        return {"exit_code": ended.returncode & 255, "output": ended.stdout, "errors": ended.stderr}

    return agent


if __name__ == "__main__":
    address, token_file, *program = sys.argv[1:]
    with open(token_file) as file:
        sys.exit(take_episodes(address, file.read().strip(), run(program)))
