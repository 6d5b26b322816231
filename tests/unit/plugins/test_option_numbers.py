"""true is no number in a run file, nor for an option of a component; where it has a meaning it is taken."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from atropos_core.config.run_file import Layer, load
from atropos_core.errors import ConfigError
from atropos_core.plugins.options import Options


class Some(Options):
    whole: int = 3
    perhaps: float | None = None
    several: tuple[int, ...] = ()
    switch: bool = False
    either: bool | int = 1


@pytest.mark.parametrize("name", ["whole", "perhaps"])
@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_is_no_number(name: str, value: bool) -> None:
    with pytest.raises(ValidationError, match="Input should be a number"):
        Some(**{name: value})
    with pytest.raises(ValidationError, match="Input should be a number"):
        Some(several=[1, value])


def test_numbers_and_booleans_stay_what_they_are() -> None:
    taken = Some(whole=4, perhaps=None, several=(1, 2), switch=True, either=False)
    assert (taken.whole, taken.perhaps, taken.several, taken.switch, taken.either) == (4, None, (1, 2), True, False)


@pytest.mark.parametrize(
    ("section", "key"),
    [("sampling", "max_tokens"), ("training", "steps"), ("evaluation", "temperature"), ("health", "rescore_every")],
)
def test_a_run_file_names_the_key_the_value_and_who_gave_it(section: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load([Layer("run.toml", {section: {key: True}})])
    assert f"{section}.{key}: input should be a number, not True (from run.toml)" in str(refused.value)
