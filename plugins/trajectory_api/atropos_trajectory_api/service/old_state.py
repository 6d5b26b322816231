"""The state of the old protocol: the trainer's registration, the environments, the step. It is saved with the journal.

`/status-env` is the only throttle that unmodified environments know: they stop when `queue_size * group_size` reaches
`max_batches_offpolicy * batch_size`. The arithmetic is atroposlib's, with counters instead of scans of the queue, but for two cases.
An environment with less than an equal part of the waiting groups is not stopped because of the others' groups; otherwise it would
never run next to environments that do not ask. And no more batches are reported than it takes to stop, because an environment ends
for good once the queue is as long as its remaining steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from atropos_core.errors import HubFull
from atropos_trajectory_api.service.old_registrations import RegisterEnv, Registration

LEAST_WEIGHT = 0.01  # the least that atroposlib reports
STOP_BATCHES = 4  # queued batches reported by a hub that is nearly full; clients stop at 3 unless configured otherwise
MOST_ENVIRONMENTS = 1000


@dataclass
class OldEnvironment:
    """One registration. A restarted environment registers anew, under the next number."""

    id: int
    name: str  # with a suffix that makes it unique: also its name in the hub
    desired_name: str
    max_context_len: int
    weight: float
    group_size: int
    min_batch_allocation: float | None
    largest: int  # the largest group that it has sent, or registered with
    connected: bool = True
    seen: float = 0.0

    @property
    def share(self) -> float:
        """Its weight among others, as atroposlib computes it."""
        return self.max_context_len * max(0.0, self.weight) if self.connected else 0.0

    @property
    def minimum(self) -> float:
        return self.min_batch_allocation or 0.0 if self.connected else 0.0


class OldState:
    """The whole state. `on_change` is called when something should be saved."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.reset()

    def reset(self) -> None:
        """Return to the state after a start."""
        self.registration: Registration | None = None
        self.native = False  # a trainer of the native protocol stands in for the registration
        self.started = False  # environments may register
        self.step = 0
        self.environments: dict[int, OldEnvironment] = {}
        self.names: dict[str, int] = {}  # desired name -> how often it was given
        self.next_id = 0
        self.anonymous_largest = 1

    def register(self, registration: Registration) -> bool:
        """True if this registration counts: only the first one does, until a reset."""
        if self.registration is not None and not self.native:
            return False
        self.registration, self.native = registration, False
        self.step, self.started = registration.starting_step, False
        self.on_change()
        return True

    def serve_native(self, *, batch_size: int, max_token_len: int, step: int, num_steps: int = -1) -> None:
        """A trainer of the native protocol has opened its session. Old environments need only know this about it."""
        if self.registration is not None and not self.native:
            group, project = self.registration.wandb_group, self.registration.wandb_project
        else:
            group = project = ""
        self.registration = Registration.model_construct(
            wandb_group=group, wandb_project=project, batch_size=batch_size, max_token_len=max_token_len,
            checkpoint_dir="", save_checkpoint_interval=-1, starting_step=step, num_steps=num_steps,
        )  # fmt: skip
        self.native = self.started = True
        self.step = step
        self.on_change()

    def advance(self, step: int) -> None:
        if step != self.step:
            self.step = step
            self.on_change()

    def start(self) -> None:
        if not self.started:
            self.started = True
            self.on_change()

    def add(self, wanted: RegisterEnv, now: float) -> OldEnvironment:
        """Add an environment. Raises HubFull if a thousand are already connected."""
        if len(self.environments) >= MOST_ENVIRONMENTS:
            oldest = min(self.environments.values(), key=lambda one: (one.connected, one.seen))
            if oldest.connected:
                raise HubFull(
                    f"{MOST_ENVIRONMENTS} environments are connected, so {wanted.desired_name!r} cannot be added.",
                    remedy="End some, or POST /disconnect-env for those that have ended.",
                )
            del self.environments[oldest.id]
        count = self.names.get(wanted.desired_name, 0)
        self.names[wanted.desired_name] = count + 1
        if len(self.names) > 10 * MOST_ENVIRONMENTS:
            self.names.pop(next(iter(self.names)))
        made = OldEnvironment(
            self.next_id, f"{wanted.desired_name}_{count}", wanted.desired_name, wanted.max_token_length, wanted.weight,
            wanted.group_size, wanted.min_batch_allocation, wanted.group_size, seen=now,
        )  # fmt: skip
        self.environments[made.id] = made
        self.next_id += 1
        self.on_change()
        return made

    def silent(self, before: float) -> list[OldEnvironment]:
        """Disconnect and return the environments that were last seen before then."""
        found = [one for one in self.environments.values() if one.connected and one.seen < before]
        for one in found:
            one.connected = False
        if found:
            self.on_change()
        return found

    def status(self, asking: OldEnvironment, waiting: Mapping[str, int], *, nearly_full: bool) -> dict[str, Any]:
        """The answer to /status-env. `waiting` has the sequences in the hub by environment name."""
        batch_size = self.registration.batch_size if self.registration else 0
        total = sum(one.share for one in self.environments.values())
        sizes = {one.name: one for one in self.environments.values() if one.name in waiting}
        unknown = self.anonymous_largest if waiting.keys() - sizes.keys() else 1
        largest = max([one.largest for one in sizes.values()], default=1)
        largest = max(largest, unknown)
        own = waiting.get(asking.name, 0)
        others = 0
        for name, sequences in waiting.items():
            if name != asking.name:
                reserved = int(batch_size * sizes[name].minimum) if name in sizes else 0
                others += max(0, math.ceil(sequences / largest) * largest - reserved)
        queue, mine = (own + others) // asking.largest, own // asking.largest
        stop = math.ceil(STOP_BATCHES * max(batch_size, 1) / asking.group_size)
        parts = len(waiting.keys() | {asking.name})
        if own * parts < sum(waiting.values()):
            if queue * asking.largest > batch_size:  # up to there, what waits is reported
                queue = min(queue, own * parts // asking.largest)  # as if every environment had as much as this one
        elif nearly_full:
            queue, mine = max(queue, stop), max(mine, stop)
        return {
            "current_step": self.step,
            "queue_size": min(queue, stop),
            "unallocated_fraction": 1.0 - min(1.0, sum(one.minimum for one in self.environments.values())),
            "self_queue_size": min(mine, stop),
            "max_group_size": largest,
            "env_weight": max(LEAST_WEIGHT, asking.share / total if total > 0 else 0.0),
        }

    def state(self) -> dict[str, Any]:
        """The state for the journal, as plain JSON."""
        return {
            "registration": self.registration.model_dump() if self.registration else None,
            "native": self.native,
            "started": self.started,
            "step": self.step,
            "environments": [asdict(one) for one in self.environments.values()],
            "names": self.names,
            "next_id": self.next_id,
            "anonymous_largest": self.anonymous_largest,
        }

    def load(self, state: Mapping[str, Any], now: float) -> None:
        """Load a saved state; every environment counts as seen now."""
        given = state["registration"]
        self.registration = Registration.model_construct(**given) if given else None
        self.native, self.started, self.step = state["native"], state["started"], state["step"]
        self.environments = {one["id"]: OldEnvironment(**{**one, "seen": now}) for one in state["environments"]}
        self.names, self.next_id = dict(state["names"]), state["next_id"]
        self.anonymous_largest = state["anonymous_largest"]
