"""docs/hooks.md says what the hook specifications say, and the README's example runs."""

from __future__ import annotations

import inspect
import re

from atropos_core import hooks
from tests.conftest import REPOSITORY


def test_the_page_of_hooks_has_every_hook_with_its_docstring():
    page = (REPOSITORY / "docs/hooks.md").read_text()
    named = {name: value for name, value in vars(hooks).items() if name.startswith("atropos_")}
    assert set(re.findall(r"^### `(\w+)", page, re.M)) == set(named)
    for name, hook in named.items():
        assert inspect.getdoc(hook) in page, name


def test_the_readme_example_is_an_environment_that_trains(atropos, tmp_path):
    readme = (REPOSITORY / "README.md").read_text()
    [source] = re.findall(r"```python\n(.*?class \w+\(Environment\).*?)```", readme, re.S)
    assert len(source.splitlines()) <= 30
    (tmp_path / "countdown.py").write_text(source)
    ended = atropos("run", "--model", "toy", "--env", "./countdown.py", "--steps", "3", "--dir", "run")
    assert ended.code in (0, 1), ended.err
    assert "steps" in ended.out
    assert "Traceback" not in ended.err
