from __future__ import annotations

import sys
import time

import pytest

from tests.machines.network import Network, why_not


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    if why_not():
        pytest.skip(f"this machine makes no namespaces: {why_not()}")
    folder = tmp_path_factory.mktemp("agents")
    made = Network(["first", "second"])
    for name, machine in made.machines.items():
        machine.start(sys.executable, "-m", "tests.machines.agent", str(folder / name), output=folder / f"{name}.out")
        until = time.monotonic() + 60
        while not (folder / name).exists():
            assert time.monotonic() < until, (folder / f"{name}.out").read_text()
            time.sleep(0.05)
    yield made, folder
    made.close()
