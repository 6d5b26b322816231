"""What a process asks a cluster for."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from atropos_launcher_ray.config import RayOptions, RoleResources


def test_what_is_nothing_is_not_requested() -> None:
    assert RoleResources(cpus=0).bundle() == {}
    assert RoleResources().bundle() == {"CPU": 1.0}


def test_resources_in_rays_words() -> None:
    wanted = RoleResources(cpus=2, gpus=0.5, memory_gb=3, other={"disk": 1})
    assert wanted.bundle() == {"CPU": 2.0, "GPU": 0.5, "memory": 3e9, "disk": 1.0}


@pytest.mark.parametrize("wrong", [{"cpus": -1}, {"other": {"disk": 0}}, {"cores": 1}])
def test_what_no_machine_can_give_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RayOptions.model_validate({"roles": {"engine": wrong}})
