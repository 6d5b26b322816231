from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import FitError
from atropos_torch_models import probes

PROBE = """import json, sys
open({count!r}, "a").write("x")
print("what transformers says")
print(json.dumps(dict(off=0.5, directory=sys.argv[1])))
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "model", model_type="llama", num_hidden_layers=2)
    return tmp_path / "model"


def write(directory: Path, **config: Any) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))


def a_probe(folder: Path, name: str, text: str | None = None) -> Path:
    count = folder / f"{name}.count"
    (folder / f"{name}.py").write_text(text or PROBE.format(count=str(count)))
    return count


def test_each_configuration_is_measured_once_in_a_process_of_its_own(tmp_path: Path, model: Path) -> None:
    count = a_probe(tmp_path, "probe_once")
    first = probes.probed(model, "layout", "probe_once")
    assert first == {"off": 0.5, "directory": str(model)}
    assert probes.probed(model, "layout", "probe_once") == first and count.read_text() == "x"
    assert probes.kept(model, "layout", "probe_once") == first and probes.kept(model, "other", "probe_once") is None
    write(model, model_type="llama", num_hidden_layers=2, _name_or_path="elsewhere")
    assert probes.probed(model, "layout", "probe_once") == first, "a name changes nothing"
    write(model, model_type="llama", num_hidden_layers=2, sliding_window=16)
    probes.probed(model, "layout", "probe_once")
    assert count.read_text() == "xx", "but a window does"


def test_code_that_changed_is_asked_again(tmp_path: Path, model: Path) -> None:
    package = tmp_path / "probe_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    count = a_probe(package, "one")
    probes.probed(model, "layout", "probe_package.one")
    (package / "two.py").write_text("changed = True")
    probes.probed(model, "layout", "probe_package.one")
    assert count.read_text() == "xx"


def test_a_damaged_result_is_measured_again(tmp_path: Path, model: Path) -> None:
    count = a_probe(tmp_path, "probe_damaged")
    probes.probed(model, "layout", "probe_damaged")
    [place] = (tmp_path / "cache/atropos/probes").iterdir()
    for damage in ("", "[1]", "{"):
        place.write_text(damage)
        assert probes.probed(model, "layout", "probe_damaged")["off"] == 0.5
    assert count.read_text() == "xxxx"


def test_a_probe_that_fails_says_why_and_keeps_nothing(tmp_path: Path, model: Path) -> None:
    a_probe(tmp_path, "probe_failing", 'import sys\nsys.exit("no such layer: mamba9")')
    with pytest.raises(FitError, match=rf"{sys.executable}.* ended with code 1: no such layer: mamba9"):
        probes.probed(model, "layout", "probe_failing")
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_a_cache_that_cannot_be_written_costs_a_measurement_only(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = a_probe(tmp_path, "probe_uncached")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert probes.probed(model, "layout", "probe_uncached")["off"] == 0.5
    assert count.read_text() == "xx"


@pytest.mark.parametrize(
    ("config", "is_plain"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, True),
        ({"model_type": "qwen2", "sliding_window": 4096}, False),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"model_type": "llama", "final_logit_softcapping": 30.0}, False),
        ({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, False),
        ({"model_type": "mamba"}, False),
        ({}, False),
    ],
)
def test_only_what_config_json_says_outright_is_plain(model: Path, config: dict[str, Any], is_plain: bool) -> None:
    write(model, **config)
    assert probes.plain(model) == is_plain


def test_the_tiny_policy_is_plain() -> None:
    assert probes.plain(TOY_MODEL)
