"""What is swapped behind a run's back is noticed by name: docs/swaps.md has the whole table. Real processes, the tiny policy."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atropos_core.plugins.manager import load_plugins
from tests.e2e.roles import Role, Scene, scene

pytestmark = pytest.mark.slow

RUN = (
    "--set", "evaluation.problems=0", "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
    "--set", "trainer.learning_rate=3e-3", "--set", "checkpoint.every=0",
)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path):
    with scene(tmp_path) as made:
        yield made


def with_template(directory: Path) -> None:
    """Another chat template."""
    for path in directory.glob("*"):
        if path.name == "chat_template.jinja":
            path.write_text(path.read_text() + " ")
        elif path.name == "tokenizer_config.json" and "chat_template" in (weights := json.loads(path.read_text())):
            path.write_text(json.dumps(weights | {"chat_template": weights["chat_template"] + " "}))


def with_weights(directory: Path) -> None:
    """Other weights of the same shape."""
    path = directory / "model.safetensors"
    random = np.random.default_rng(0)
    weights = load_file(path)
    save_file({name: (value + random.normal(0, 0.05, value.shape)).astype(value.dtype) for name, value in weights.items()}, path,
              metadata={"format": "pt"})  # fmt: skip


def other(folder: Path, change: Callable[[Path], None]) -> Path:
    directory = folder / change.__name__
    shutil.copytree(load_plugins().resolve_model("tiny").directory, directory)
    change(directory)
    return directory


def engine(place: Scene, name: str, model: str | Path, bridge: str, port: int) -> Role:
    return place.start(name, "engine", "--model", str(model), "--bridge", bridge, "--port", str(port))


def training(place: Scene, bridge: str, port: int, *more: str, steps: int = 200) -> Role:
    return place.start(
        "run", "run", "--model", "tiny", "--env", "gsm8k", "--dir", "run", "--steps", str(steps), "--engine", "remote",
        "--set", f"engine.url=http://127.0.0.1:{port}", "--bridge", bridge, *RUN, *more,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Relay:
    """An address behind which now one and now another process answers."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._open: list[socket.socket] = []

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self.turn_to(0)

    def turn_to(self, target: int) -> None:
        self._target, ends, self._open = target, self._open, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                there = socket.create_connection(("127.0.0.1", self._target))
                self._open += [here, there]
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    @staticmethod
    def _pump(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := one.recv(1 << 16):
                other.sendall(piece)
            other.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    ("change", "bridge", "named"),
    [(with_template, "checkpoint", "TokenizerMismatch"), (with_weights, "lora", "Misaligned")],
    ids=["its chat template", "the base under its adapters"],
)
def test_an_engine_elsewhere_that_differs_is_named_before_anything_is_learned_from_it(
    place, tmp_path, change, bridge, named
):
    port = free_port()
    engine(place, "engine", other(tmp_path, change), bridge, port).says(r"(http://[\w.:]+)")
    run = training(place, bridge, port, steps=4)
    assert run.ends(120) == 1, place.all_text
    assert named in run.text and "Traceback" not in run.text


def test_another_process_behind_an_engines_address_is_opened_anew_as_often_as_restarts_say_and_then_ends_the_run(
    place, tmp_path
):
    ports = free_port(), free_port()
    for model, port in zip(("tiny", other(tmp_path, with_weights)), ports, strict=True):
        engine(place, f"engine-{port}", model, "checkpoint", port).says(r"(http://[\w.:]+)")
    with Relay(ports[0]) as relay:
        run = training(place, "checkpoint", relay.port, "--set", "restarts=1", "--set", "checkpoint.every=1")
        place.wait_for_step(2, run)
        relay.turn_to(ports[1])
        run.says("starting again from the last checkpoint", 120)
        assert "EngineReplaced" not in run.text, "nobody has seen it as an error of the run"
        place.wait_for_step(place.metrics[-1]["step"] + 2, run)
        relay.turn_to(ports[0])
        assert run.ends(120) == 1, place.all_text
        message = " ".join(run.text.split())
        assert "EngineReplaced" in message and "not the process that the run opened" in message
        steps = int(place.metrics[-1]["step"])
        resumed = place.start("resumed", "resume", "run", "--set", f"training.steps={steps + 1}")
        assert resumed.ends(120) == 0, place.all_text
    assert [line["step"] for line in place.metrics] == list(range(1, steps + 2))
    assert max(line["alignment/max_abs_logprob_diff"] for line in place.metrics) <= 1e-4, (
        "each was sent the run's weights"
    )


def test_weights_that_are_swapped_in_the_bridges_directory_end_the_run_by_name(place, tmp_path):
    swapped = other(tmp_path, with_weights) / "model.safetensors"
    stop = threading.Event()

    def swap() -> None:
        done: set[Path] = set()
        while not stop.is_set():
            for directory in (tmp_path / "run" / "published").glob("v*"):
                if directory not in done and (directory / "model.safetensors").exists():
                    done.add(directory)
                    shutil.copy(swapped, directory / "other")
                    (directory / "other").replace(directory / "model.safetensors")
            time.sleep(0.0002)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        run = place.start(
            "run",
            "run",
            "--model",
            "tiny",
            "--env",
            "gsm8k",
            "--dir",
            "run",
            "--steps",
            "200",
            "--bridge",
            "checkpoint",
            *RUN,
        )
        assert run.ends(120) == 1, place.all_text
    finally:
        stop.set()
        swapping.join()
    assert "Misaligned" in run.text and "Look at the bridge first" in " ".join(run.text.split())
