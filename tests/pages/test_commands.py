"""The commands on the pages, typed as they stand but for fewer and smaller steps; and what a page shows of their output."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.conftest import metrics_of
from tests.pages.blocks import the_block
from tests.pages.typed import SMALL, Typed, alike, can_type, typing

pytestmark = pytest.mark.skipif(bool(can_type()), reason=can_type())


@pytest.fixture
def typed(tmp_path) -> Iterator[Typed]:
    with typing(tmp_path) as there:
        yield there


def shows(page: str, first: str, message: str) -> None:
    """Every line that the page shows is in the output, but for its figures."""
    message = re.sub(r"[ \t]+", " ", message)
    for line in the_block(page, first).text.splitlines():
        if line.strip() not in ("", "..."):
            assert re.search(alike(line), message), f"{page} shows {line!r}, which nothing printed:\n{message}"


@pytest.fixture(scope="module")
def a_run(tmp_path_factory) -> Iterator[tuple[Typed, str]]:
    """What `make run` types, in two small steps, with two sinks more; and its output."""
    [command] = re.findall(r"then runs `(atropos run .*?)`", _page("README.md"))
    assert command in _page("Makefile"), "what make run types"
    sinks = " ".join(f"--set sink.{name}.use={name}" for name in ("console", "jsonl", "csv", "tensorboard"))
    with typing(tmp_path_factory.mktemp("run")) as there:
        yield there, there.type(f"{command} --dir runs/gsm8k-20260131-120000 --steps 2 {SMALL} {sinks}")


def test_a_run_says_what_the_readme_shows(a_run):
    shows("README.md", "model      tiny", a_run[1])


def test_what_the_sinks_write_is_read_as_their_pages_say(a_run):
    typed, _ = a_run
    source = the_block("plugins/sinks/README.md", "import pandas").text.replace("...", "gsm8k-20260131-120000")
    read, _, _ = source.partition("table[")  # the last line draws, which needs matplotlib
    (typed.folder / "read.py").write_text(f"{read}print(table.index.max())\n")
    assert typed.type("python read.py").split()[-1] == "2"
    [board] = the_block("plugins/sinks/README.md", ".venv/bin/tensorboard").commands
    typed.says(typed.begin(board.removeprefix(".venv/bin/") + " --port 6006"), "6006")


def test_the_evaluations_on_the_page_run(a_run):
    typed, _ = a_run
    samples, of_a_run = the_block("docs/run-file.md", "atropos eval").commands
    typed.type(f"{samples} --set evaluation.problems=8")
    assert json.loads((typed.folder / "tiny.json").read_text())
    assert "accuracy" in typed.type(of_a_run.replace("--step 50", "--step 2") + " --set evaluation.problems=8")


def test_the_commands_of_the_page_about_rewards_run(a_run):
    typed, _ = a_run
    page = "docs/my-rewards-are-all-0.md"
    doctor, view = the_block(page, "atropos doctor").commands
    [evaluation] = the_block(page, "atropos eval").commands
    assert "finished: all 2 steps" in typed.type(doctor.replace("runs/mine", "runs/gsm8k-20260131-120000"))
    typed.type(view.replace("runs/mine", "runs/gsm8k-20260131-120000"))
    assert (typed.folder / "mine.html").is_file()
    shorter = evaluation.replace("problems=64", "problems=4").replace("max_tokens=256", "max_tokens=64")
    assert "accuracy" in typed.type(shorter.replace("runs/mine", "runs/gsm8k-20260131-120000"))


def test_the_runs_of_the_page_about_settings_are_compared(typed):
    page = "docs/sweeps.md"
    rates = "1e-4 3e-4 1e-3"
    shell = the_block(page, "for rate in").text
    assert rates in shell and "--steps 40" in shell
    typed.type(shell.replace(rates, "3e-4 1e-3").replace("--steps 40", f"--steps 2 {SMALL}"))
    assert (typed.folder / "rates.png").is_file()
    of = {
        rate: tomllib.loads((typed.folder / f"runs/rate-{rate}/config.toml").read_text()) for rate in ("3e-4", "1e-3")
    }
    assert [one["trainer"]["learning_rate"] for one in of.values()] == [3e-4, 1e-3]
    script = the_block(page, "import atropos_core").text
    small = 'set={"training.groups_per_step": 2, "training.group_size": 2, "evaluation.problems": 4, '
    short = script.replace("(1e-4, 3e-4, 1e-3)", "(1e-3,)").replace("steps=40", "steps=2").replace("set={", small)
    (typed.folder / "sweep.py").write_text(short)
    assert "0.001: held-out accuracy " in typed.type("python sweep.py")


def test_the_commands_beside_the_readme_example_run(typed):
    (typed.folder / "sums.py").write_text(the_block("README.md", "import random").text)
    check, run, new = the_block("README.md", "atropos check ./sums.py").commands
    assert "fulfills its contract" in typed.type(check)
    [end] = re.findall(r"`(held-out accuracy .*?)`", _page("README.md"))
    assert re.search(alike(end), re.sub(r"[ \t]+", " ", typed.type(run.replace("--steps 40", "--steps 2") + SMALL)))
    typed.type(new)
    assert list(typed.folder.glob("**/pyproject.toml"))


def test_the_rows_of_the_page_are_trained_on(typed):
    page = "plugins/env_dataset/README.md"
    rows = [json.loads(line) for line in the_block(page, "{").text.splitlines()]
    more = [
        {"prompt": f"Ann has {a} cards and finds one.", "answer": str(a + 1), "solution": str(a + 1)} for a in range(99)
    ]
    (typed.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *more]))
    check, run = (command.partition("#")[0].strip() for command in the_block(page, "atropos check dataset").commands)
    assert "fulfills its contract" in typed.type(check)
    assert "data rows: " in re.sub(" +", " ", typed.type(f"{run} --steps 2 {SMALL}"))
    (typed.folder / "grade.py").write_text(the_block(page, "# grade.py").text)
    (typed.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    scored = typed.type(f"{run} --steps 2 {SMALL} --set environment.rows.score=./grade.py:score")
    assert "held-out accuracy" in scored


def test_the_roles_of_the_page_train_together_and_say_what_it_shows(typed):
    serve, train, worker = dict.fromkeys(the_block("docs/roles.md", "atropos serve").commands)
    typed.says(typed.begin(serve), r"http://127\.0\.0\.1:8000")
    training = typed.begin(train.replace("--steps 50", "--steps 2") + SMALL)
    working = typed.begin(worker)
    message = typed.ends_well(training)
    shows("docs/roles.md", "workers sample from", message)
    shows("docs/roles.md", "worker gsm8k@", working.read_text())


def test_roles_with_a_token_and_addresses_of_their_own_train(typed):
    token, serve, train, worker = the_block("docs/roles.md", "(umask 077").commands
    typed.type(token)
    assert (typed.folder / "token").stat().st_mode & 0o077 == 0
    typed.says(typed.begin(serve), r"http://10\.0\.0\.5:8000")
    training = typed.begin(f"{train} --steps 2 {SMALL}")
    typed.begin(worker)
    typed.ends_well(training)


def test_an_engine_elsewhere_is_sent_weights(typed):
    (typed.folder / "token").write_text("a-word-of-many-letters")
    (typed.folder / "token").chmod(0o600)
    engine, run = the_block("docs/roles.md", "atropos engine --model tiny --host").commands
    typed.says(typed.begin(engine), r"10\.0\.0\.7:8001")
    typed.type(f"{run} --steps 2 {SMALL}")


def test_the_calls_by_hand_do_what_the_page_says(typed):
    _, serve = the_block("docs/trajectory-api.md", "pip install").commands
    typed.says(typed.begin(serve), r"http://127\.0\.0\.1:8000")
    register, first, register_env, send, second = the_block("docs/trajectory-api.md", "curl -X POST").commands
    assert "uuid" in typed.type(register)
    assert json.loads(_body(typed.type(first)))["batch"] is None
    assert "env_id" in typed.type(register_env)
    typed.type(send)
    [group] = json.loads(_body(typed.type(second)))["batch"]
    assert group["tokens"] == [[1, 2], [1, 3]]
    [status] = the_block("docs/trajectory-api.md", "curl -H 'Accept").commands
    assert "hub" in json.loads(_body(typed.type(status)))


def test_a_server_for_others_answers_who_has_the_token(typed):
    token, serve, info = the_block("docs/trajectory-api.md", "(umask 077").commands
    assert the_block("plugins/trajectory_api/README.md", "(umask 077").commands == [token]
    alone, public = the_block("plugins/trajectory_api/README.md", "atropos serve").commands
    assert alone == "atropos serve" and public.replace("0.0.0.0", "10.0.0.5") == serve
    typed.type(token)
    typed.says(typed.begin(serve), r"http://10\.0\.0\.5:8000")
    assert "batch_size" in typed.type(info)
    assert "batch_size" not in typed.type("curl http://10.0.0.5:8000/info")


def test_a_loss_of_ones_own_is_checked(typed):
    (typed.folder / "mine.py").write_text(the_block("plugins/trainer_grpo/README.md", "from atropos_trainer").text)
    assert "fulfills its contract" in typed.type("atropos check ./mine.py:mine --kind loss")


def test_the_bridge_on_the_page_is_checked_and_trains(typed):
    (typed.folder / "disk.py").write_text(the_block("docs/bridges.md", "import asyncio").text)
    check, run = the_block("docs/bridges.md", "atropos check ./disk.py").commands
    assert "fulfills its contract" in typed.type(check)
    typed.type(
        f"{run} --set training.groups_per_step=4 --set training.group_size=4 --set evaluation.problems=2 --dir run"
    )
    assert max(row.get("bridge/bytes_copied", 0.0) for row in metrics_of(typed.folder / "run")) > 0, "it has published"


def _page(name: str) -> str:
    from tests.conftest import REPOSITORY

    return (REPOSITORY / name).read_text()


def _body(message: str) -> str:
    """curl writes its progress to the terminal as well."""
    return message[message.index("{") : message.rindex("}") + 1]
