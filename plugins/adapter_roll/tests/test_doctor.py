"""What the doctor says where little is installed."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json, sys
sys.modules["gem"] = None  # as where it is not installed
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from pathlib import Path
provider = load_plugins().registry.find("adapter", "roll").provider
adapter = provider.build(provider.options(), RunContext(Path("."), Path(".")))
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


OTHER = {  # a ROLL whose interfaces are not the known ones
    "roll/pipeline/agentic/utils.py": "def compute_discounted_returns(batch, gamma, adv_estimator): ...\n"
    "def compute_response_level_rewards(batch, pipeline_config, running): ...\n",
    "roll/pipeline/agentic/agentic_config.py": "from dataclasses import dataclass\n@dataclass\nclass RewardNormalizationConfig:\n"
    "    grouping: str = 'batch'\n    method: str = 'identity'\n",
    "roll/pipeline/agentic/agentic_pipeline.py": "import no_such_module\n",
}


def test_a_roll_that_is_not_as_known_is_recognised_by_its_signatures_and_fields(tmp_path):
    for name, text in OTHER.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = "import json; from atropos_adapter_roll.signatures import differences; print(json.dumps(differences()))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert "no import of agentic_pipeline (ModuleNotFoundError: No module named 'no_such_module')" in found
    assert "utils.compute_discounted_returns takes the same in another order" in found
    assert "utils.compute_response_level_rewards takes running as well" in found
    assert "there is no agentic_config.AgenticConfig" in found
    [fields] = [one for one in found if "RewardNormalizationConfig" in one]
    assert "does not know norm_mean_type, norm_std_type" in fields
