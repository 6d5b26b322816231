"""Every option of every installed component, and of the run file, says what it means."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from atropos_core.config.run_file import RunConfig
from atropos_core.plugins.manager import load_plugins
from tests.contract.test_options import models


def without_meaning(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if not (field.description or "").strip():
            yield f"{prefix}.{name}"
        for inner in models(field.annotation):
            yield from without_meaning(inner, f"{prefix}.{name}")


def test_every_option_of_every_component_says_what_it_means():
    offers = load_plugins().registry.offers()
    assert len(offers) > 30
    assert [
        path
        for offer in offers
        for path in without_meaning(offer.provider.options, f"{offer.kind} {offer.provider.name}")
    ] == []


def test_every_key_of_a_run_file_says_what_it_means():
    assert list(without_meaning(RunConfig, "run file")) == []


def test_an_option_without_a_meaning_is_found():
    class Inner(BaseModel):
        silent: int = 1

    class Outer(BaseModel):
        inner: dict[str, Inner] | None = None

    assert list(without_meaning(Outer, "x")) == ["x.inner", "x.inner.silent"]
