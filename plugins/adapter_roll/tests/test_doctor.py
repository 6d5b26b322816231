"""What the doctor says where little is installed."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
sys.modules["gem"] = None  # as where it is not installed
from atropos_core.plugins import load_plugins
from atropos_core.registry import RunContext
from pathlib import Path
provider = load_plugins().registry.find("adapter", "roll").provider
adapter = provider.build(provider.config(), RunContext(Path("."), Path(".")))
print(json.dumps([[one.subject, one.ok, one.detail, one.remedy] for one in adapter.doctor()]))
"""


def test_without_gem_the_doctor_names_what_is_missing_and_how_to_get_it():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    found = {subject: (ok, detail, remedy) for subject, ok, detail, remedy in json.loads(ended.stdout)}
    assert set(found) == {"python", "gem-llm", "ray", "ROLL", "GPU", "an episode"}
    ok, detail, remedy = found["an episode"]
    assert ok is False
    assert "gem does not import" in detail
    assert "pip install gem-llm==0.1.0" in remedy
    assert found["ROLL"][0] is False
    assert "gem" in found["ROLL"][1]
