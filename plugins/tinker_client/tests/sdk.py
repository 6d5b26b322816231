"""A stand-in for the package `tinker` that writes down what the server would be sent. tests/tinker runs the real one."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import numpy as np


def made(**fields: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**fields)


async def soon(value: Any) -> Any:
    return value


class Record(types.ModuleType):
    """The module. `sent` has (call, what it was given) in order."""

    def __init__(self, models: tuple[str, ...] = ("base",)) -> None:
        super().__init__("tinker")
        self.sent: list[tuple[str, Any]] = []
        self.models = models
        self.at_once = self.most_at_once = 0
        for name in ("Datum", "AdamParams", "SamplingParams"):
            setattr(self, name, made)
        self.ModelInput = made(from_ints=lambda ids: list(ids))
        self.TinkerError = type("TinkerError", (Exception,), {})
        self.ServiceClient = lambda **given: Session(self)


class Session:
    def __init__(self, record: Record) -> None:
        self.record = record

    def create_rest_client(self) -> Any:
        models = [made(model_name=name) for name in self.record.models]
        return made(get_server_capabilities=lambda: soon(made(supported_models=models)))

    def create_lora_training_client(self, **given: Any) -> Any:
        self.record.sent.append(("create", given))
        return soon(Training(self.record))

    def create_training_client_from_state_with_optimizer(self, path: str) -> Any:
        self.record.sent.append(("restore", path))
        return soon(Training(self.record))

    def create_sampling_client(self, **given: Any) -> Any:
        self.record.sent.append(("sampler", given))
        return soon(Sampling(self.record))

    def close(self, status: str) -> Any:
        return soon(None)


class Training:
    def __init__(self, record: Record) -> None:
        self.record = record

    def forward(self, data: list[Any], loss: str, config: Any) -> Any:
        return self._passed("forward", data, loss, config)

    def forward_backward(self, data: list[Any], loss: str, config: Any) -> Any:
        return self._passed("forward_backward", data, loss, config)

    def _passed(self, call: str, data: list[Any], loss: str, config: Any) -> Any:
        given = [{name: np.asarray(value).tolist() for name, value in one.loss_fn_inputs.items()} for one in data]
        self.record.sent.append((call, (loss, config, given)))
        outputs = [{"logprobs": made(to_numpy=lambda one=one: np.full(len(one.model_input), -1.0))} for one in data]
        return soon(made(loss_fn_outputs=outputs, metrics={"loss:sum": 0.5}))

    def optim_step(self, adam: Any) -> Any:
        self.record.sent.append(("optim_step", vars(adam)))
        return soon(made(metrics={}))

    def save_state(self, name: str) -> Any:
        return soon(made(path=f"tinker://run/weights/{name}"))

    def save_weights_for_sampler(self, name: str, *, ttl_seconds: int) -> Any:
        self.record.sent.append(("publish", ttl_seconds))
        return soon(made(path=f"tinker://run/sampler_weights/{name}"))


class Sampling:
    def __init__(self, record: Record) -> None:
        self.record = record

    async def sample(self, prompt: Any, n: int, parameters: Any) -> Any:
        self.record.sent.append(("sample", vars(parameters)))
        self.record.at_once += 1
        self.record.most_at_once = max(self.record.most_at_once, self.record.at_once)
        await asyncio.sleep(0)
        self.record.at_once -= 1
        return made(sequences=[made(tokens=[5, 2], logprobs=[-1.0, -0.5], stop_reason="stop")])
