"""Offers the engine "hf"."""

from __future__ import annotations

from collections.abc import Iterable

from atropos_core import hookimpl
from atropos_core.interfaces import Engine, Transport
from atropos_core.registry import Provider, RunContext
from atropos_engine_hf.config import HFOptions


def build(options: HFOptions, context: RunContext) -> Engine:
    from atropos_engine_hf.engine import HFEngine

    return HFEngine(options, context)


def transports(options: HFOptions) -> frozenset[Transport]:
    """By the device in the options; where the run chooses the device, either way of sharing memory is open."""
    if options.device is None:
        return frozenset({"posix_shm", "cuda_ipc", "checkpoint"})
    return frozenset({"cuda_ipc" if options.device.startswith("cuda") else "posix_shm", "checkpoint"})


@hookimpl
def atropos_engines() -> Iterable[Provider[Engine]]:
    yield Provider(
        name="hf",
        summary="samples from a Hugging Face model by a batched decode loop; CPU or one GPU",
        config=HFOptions,
        build=build,
        transports=transports,
        requires=frozenset({"torch", "transformers"}),
        runs_in="process",
    )
