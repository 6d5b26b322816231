"""A stand-in for a trainer in its own process, called like any child."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from atropos_core.processes import child_main


class Holder:
    def __init__(self, directory: str) -> None:
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))

    def weights_moved(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    async def close(self) -> None: ...


class HolderHost(child_main.Host):
    async def build(self, wanted: dict[str, Any]) -> None:
        self.component = Holder(wanted["model"])
        self.peer.handlers |= {"scale": self.scale, "norm": self.norm, "fault_in": self.fault_in}

    async def scale(self, factor: float) -> None:
        with torch.no_grad():
            for parameter in self.component.model.parameters():
                parameter.mul_(factor)

    async def norm(self) -> float:
        return float(sum(parameter.double().square().sum() for parameter in self.component.model.parameters()))

    async def fault_in(self) -> float:
        """Touch every page."""
        return float(sum(parameter.sum() for parameter in self.component.model.parameters()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    child_main.main(HolderHost)
