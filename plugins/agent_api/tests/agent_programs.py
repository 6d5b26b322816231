"""Programs that the tests start as agents: `python agent_programs.py NAME`. Only the standard library, so that they start at once."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def say(*messages: dict[str, Any], url: str | None = None, key: str | None = None, **fields: Any) -> str:
    """The model's answer."""
    body = {"model": os.environ.get("MODEL", "any"), "messages": messages, **fields}
    request = urllib.request.Request(
        f"{url or os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        content: str = json.load(answer)["choices"][0]["message"]["content"]
    return content


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def task() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ["ATROPOS_TASK_FILE"]).read_text())
    return found


def once() -> None:
    """Says the task, and writes and prints the answer."""
    answer = say(user(task()["prompt"]))
    Path("answer.txt").write_text(answer)
    print(answer)


def repeats() -> None:
    """Prints what it was given, in each of the ways."""
    say(user(task()["prompt"]))
    print(json.dumps([sys.argv[2], os.environ["WORD"], sys.stdin.read(), task()["prompt"]]))


def twice() -> None:
    """Goes on in the same conversation."""
    first = say(user(task()["prompt"]))
    say(user(task()["prompt"]), {"role": "assistant", "content": first}, user("again"))


def apart() -> None:
    """Two conversations: the second has a tool, and says who speaks."""
    say(user("a title, please"))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    say(user(task()["prompt"]), tools=[tool])


def title_last() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    say(user(task()["prompt"]), tools=[tool])
    say(user("a title, please"))


def for_ever() -> None:
    """Calls until it is refused, and says by which code."""
    try:
        while True:
            say(user("more"))
    except urllib.error.HTTPError as error:
        print(json.load(error)["error"]["code"])


def hot() -> None:
    """Wants to be sampled otherwise."""
    try:
        say(user("more"), temperature=0.123)
        print("overruled")
    except urllib.error.HTTPError as error:
        say(user("then without"))
        print(json.load(error)["error"]["code"])


def shows() -> None:
    """All that it was started with."""
    say(user("x"))
    files = {
        f"{name}/{one.relative_to(at)}": one.read_text()
        for name, at in (("home", Path(os.environ["HOME"])), ("work", Path(".")))
        for one in at.rglob("*")
        if one.is_file()
    }
    found = {"argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd(), "files": files, "stdin": sys.stdin.read()}
    print(json.dumps(found))


def fails() -> None:
    once()
    print("it is broken", file=sys.stderr)
    sys.exit(3)


def never_calls() -> None:
    print("nothing to say", file=sys.stderr)


def never_ends() -> None:
    once()
    time.sleep(600)


def leaves_much() -> None:
    """Files that take no room on the disk, and together are too large to be copied."""
    once()
    for name in "abc":
        os.truncate(os.open(name, os.O_CREAT | os.O_WRONLY), 900_000)


def leaves_links() -> None:
    once()
    for number in range(3000):
        os.symlink(f"{number - 1}" if number else "answer.txt", str(number))


def prints() -> None:
    once()
    while True:
        print("x" * 1000)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
