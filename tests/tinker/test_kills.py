"""Killed servers, killed clients, several clients at once: each ends with the bits that it has undisturbed."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.tinker.server import TinkerServer, ended, tinker_server
from tests.waiting import wait_until

STEPS = 8
pytestmark = pytest.mark.timeout(900)


def weights(server: TinkerServer, path: str) -> dict[str, Any]:
    """Return the files of a checkpoint, but for the server's own, which has its name and the time. peft writes its list of layers in the
    order of a set."""
    directory = server.adapter(path)
    found: dict[str, Any] = {one.name: one.read_bytes() for one in directory.iterdir() if one.name != "checkpoint.json"}
    config = json.loads(found["adapter_config.json"])
    found["adapter_config.json"] = config | {"target_modules": sorted(config["target_modules"])}
    assert "adapter_model.safetensors" in found and len(found) > 2
    return found


def progress(out: Path) -> list[str]:
    file = out.with_suffix(".progress")
    return file.read_text().splitlines() if file.exists() else []


def comparable(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("losses", "samples")}


class Undisturbed:
    """What clients get when nothing else happens: one after another, each run once."""

    def __init__(self, server: TinkerServer, model: str, out: Path) -> None:
        self._server, self._model, self._out = server, model, out
        self._found: dict[int, dict[str, Any]] = {}

    def of(self, seed: int) -> dict[str, Any]:
        if seed not in self._found:
            one = self._server.run("train.py", self._model, seed, STEPS, out=self._out / f"{seed}.json")
            self._found[seed] = {**one, "weights": weights(self._server, one["final"])}
        return self._found[seed]


@pytest.fixture(scope="module")
def undisturbed(server: TinkerServer, tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(server, tiny, tmp_path_factory.mktemp("alone"))


def test_a_server_that_is_killed_again_and_again_loses_nothing(
    undisturbed: Undisturbed, tiny: str, tmp_path: Path
) -> None:
    """kill -9 at three places of the client's training, which notices nothing."""
    dice = random.Random(11)
    out = tmp_path / "client.json"
    with tinker_server(tmp_path, tiny) as server:
        client = server.begin("train.py", tiny, 0, STEPS, out=out)
        for at in sorted(dice.sample(range(1, STEPS - 1), 3)):
            wait_until(lambda at=at: len(progress(out)) >= at or client.poll() is not None, f"step {at}", 120)
            server.kill()
            server.start()
        found = ended(client, out)
        assert comparable(found) == comparable(undisturbed.of(0))
        assert weights(server, found["final"]) == undisturbed.of(0)["weights"]


def test_a_server_that_is_killed_while_it_works_repeats_the_rest_and_nothing_twice(
    undisturbed: Undisturbed, tiny: str, tmp_path: Path
) -> None:
    """Kills at once after requests were accepted, whatever is in work then."""
    dice = random.Random(5)
    out = tmp_path / "client.json"
    with tinker_server(tmp_path, tiny) as server:
        client = server.begin("train.py", tiny, 1, STEPS, out=out)
        journals = tmp_path / "server/models"

        def size() -> int:
            return sum(file.stat().st_size for file in journals.glob("*/journal"))

        for _ in range(3):
            wanted = size() + dice.randrange(200, 3000)
            wait_until(lambda wanted=wanted: size() >= wanted or client.poll() is not None, "the journal grows", 120)
            server.kill()
            server.start()
        found = ended(client, out)
        assert comparable(found) == comparable(undisturbed.of(1))
        assert weights(server, found["final"]) == undisturbed.of(1)["weights"]


def test_a_client_that_is_killed_goes_on_from_its_checkpoint(
    server: TinkerServer, undisturbed: Undisturbed, tiny: str, tmp_path: Path
) -> None:
    out = tmp_path / "killed.json"
    client = server.begin("train.py", tiny, 2, STEPS, out=out)
    wait_until(lambda: len(progress(out)) >= 6, "six steps", 120)
    client.send_signal(signal.SIGKILL)
    client.wait(30)
    checkpoint = progress(out)[-1].split()[1]
    again = server.run("train.py", tiny, 2, STEPS, checkpoint, out=tmp_path / "again.json")
    done = int(checkpoint.rsplit("step", 1)[1])
    assert again["losses"] == undisturbed.of(2)["losses"][2 * done :]
    assert weights(server, again["final"]) == undisturbed.of(2)["weights"]


def test_eight_clients_at_once_get_what_they_get_alone(undisturbed: Undisturbed, tiny: str, tmp_path: Path) -> None:
    """Three adapters have room in trainer and engine: the others come and go."""
    with tinker_server(tmp_path, tiny, "--adapters", "3") as server:
        outs = [tmp_path / f"{seed}.json" for seed in range(8)]
        clients = [server.begin("train.py", tiny, seed, STEPS, out=out) for seed, out in enumerate(outs)]
        found = [ended(client, out) for client, out in zip(clients, outs, strict=True)]
        for seed, one in enumerate(found):
            assert comparable(one) == comparable(undisturbed.of(seed)), seed
            assert weights(server, one["final"]) == undisturbed.of(seed)["weights"], seed
        assert len({one["losses"][0] for one in found}) == 8  # they differ from one another
