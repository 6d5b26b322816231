"""Everything that the endpoints use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atropos_tinker_api.refused import Refused
from atropos_tinker_api.state.checkpoints import Checkpoints
from atropos_tinker_api.state.models import Models
from atropos_tinker_api.state.samplers import Samplers
from atropos_tinker_api.state.sessions import Sessions
from atropos_tinker_api.work.operations import Limits
from atropos_tinker_api.work.sampling import SamplingWork
from atropos_tinker_api.work.training import Training

ALPHA = 32.0  # of every adapter: the protocol has no number for it


@dataclass
class Service:
    """`model`: the base model's directory; `names`: what clients may call it; `architecture`: of its class."""

    model: Path
    names: tuple[str, ...]
    architecture: str
    limits: Limits
    sessions: Sessions
    models: Models
    checkpoints: Checkpoints
    samplers: Samplers
    training: Training
    sampling: SamplingWork

    def check_base(self, name: str) -> str:
        """Raises Refused for a base model that is not served here."""
        if name not in self.names:
            raise Refused(
                f"the base model {name[:200]!r} is not served here: this server has {', '.join(self.names)}. "
                "`atropos tinker --name` gives it another name."
            )
        return name
