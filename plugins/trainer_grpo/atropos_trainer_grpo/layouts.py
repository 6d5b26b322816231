"""Choose how sequences are laid out for a model: packed into one row, or one to a row. The fastest way that is exact wins.

It depends on the architecture if a way is exact. layout_probe.py measures it on a small copy, once for each configuration. Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atropos_core.errors import FitError
from atropos_torch_models.probes import plain, probed

if TYPE_CHECKING:
    from atropos_core.plugins.model_provider import Workload
    from atropos_trainer_grpo.config import GrpoOptions

REPLAY = "router replay"  # in a probe's result: the difference that it makes to replay a model's own choice, or why it cannot be
PROBE, MODULE = "trainer", "atropos_trainer_grpo.layout_probe"
# Of a difference to single sequences: float32 gives 1e-6 to 3e-5, and a leak in the small copy 0.2 and more.
LIMIT = 1e-3
WAYS: tuple[tuple[Literal["packed", "rows"], bool], ...] = (
    ("packed", False), ("packed", True), ("rows", False), ("rows", True),
)  # fmt: skip
STATES = {  # of layers that are not attention, by their names in config.json
    "linear_attention": "linear-attention layers", "conv": "short convolutions", "mamba": "Mamba layers", "mamba2": "Mamba layers",
    "recurrent": "recurrent layers", "lightning_attention": "lightning-attention layers", "hybrid": "hybrid Mamba layers",
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How the trainer computes a model."""

    name: Literal["packed", "rows"] = "packed"
    own_logits: bool = False  # from the model's own forward (own_logits.py), since their form is not known
    eager_heads: int = 0  # rows: heads whose attention holds the scores of all pairs of tokens; 0 if it does not
    why: str = ""  # it is not packed

    @property
    def line(self) -> str:
        """One line about it, for the start of a run."""
        if self.name == "packed":
            return "packed: exact for this model"
        return f"rows: {self.why}; prompts are not shared"


PACKED = Layout()


def way(layout: str, own_logits: bool) -> str:
    """The name of a way in a probe's result."""
    return f"{layout}, own logits" if own_logits else layout


def layout_of(directory: Path, options: GrpoOptions) -> Layout:
    """Return the layout for this model, measured in a child process if it is not known yet. Raises FitError if none is exact, or if the
    options want another."""
    if plain(directory) and options.layout != "rows":
        return PACKED
    file = directory / "config.json"
    return chosen(_found(directory, file.stat().st_mtime_ns), directory, options)


def check_replay(directory: Path) -> None:
    """Raises FitError if the routers of this model cannot be replayed."""
    file = directory / "config.json"
    found = _found(directory, file.stat().st_mtime_ns)
    if not _is_exact(value := found[REPLAY]):
        raise FitError(
            f"trainer.router_replay = true is not possible for a model of type {found['model_type']!r}: "
            + (
                value
                if isinstance(value, str)
                else f"its own choice, replayed, changes logits by {value:.2g} of their spread"
            )
            + ".",
            remedy="Set trainer.router_replay = false: the trainer's own routers then choose.",
        )


def path(options: GrpoOptions, workload: Workload) -> str:
    """Say which layout a run takes, and why."""
    return layout_of(workload.context.model, options).line


def chosen(found: Mapping[str, Any], directory: Path, options: GrpoOptions) -> Layout:
    """Choose by what a probe has found: for each way its largest difference, or the reason why it cannot be computed."""
    if "refused" in found:
        raise FitError(found["refused"], remedy=found["remedy"])
    allowed = [one for one in WAYS if options.layout in ("auto", one[0])]
    exact = [one for one in allowed if _is_exact(found[way(*one)])]
    kind = found["model_type"]
    if not exact:
        raise _none_is_exact(found, directory, options)
    name, own_logits = exact[0]
    if name == "packed":
        return Layout(own_logits=own_logits)
    if options.attention != "auto":
        raise FitError(
            f'trainer.attention = "{options.attention}" is about packed sequences, and a model of type {kind!r} is trained one sequence '
            f"to a row, with its own attention: {_why(found)}.",
            remedy='Leave trainer.attention out, or set it to "auto".',
        )
    return Layout(
        name,
        own_logits,
        int(found["eager_heads"]),
        _why(found) if options.layout == "auto" else 'trainer.layout = "rows"',
    )


def _none_is_exact(found: Mapping[str, Any], directory: Path, options: GrpoOptions) -> FitError:
    kind = found["model_type"]
    if options.layout == "packed" and any(_is_exact(found[way(*one)]) for one in WAYS):
        return FitError(
            f'trainer.layout = "packed" is not exact for a model of type {kind!r}: {_why(found)}. On a small copy of the model in '
            f"{directory}, {_said(found, 'packed')}.",
            remedy='Set trainer.layout = "auto", which takes one sequence to a row: that is exact.',
        )
    tried = "; ".join(_said(found, name) for name in ("packed", "rows") if options.layout in ("auto", name))
    return FitError(
        f"trainer 'grpo' has no exact way to train a model of type {kind!r}. On a small copy of the model in {directory}, {tried}.",
        remedy="Use a model of another type, such as qwen3, qwen3_5 or lfm2.",
    )


def _said(found: Mapping[str, Any], name: str) -> str:
    """Say what was measured of a layout, by the better of its two ways."""
    values = [found[way(name, own)] for own in (False, True)]
    numbers = [value for value in values if isinstance(value, float)]
    where = "packed sequences" if name == "packed" else "rows with padding"
    if not numbers:
        return f"{where} cannot be computed: {values[0]}"
    return f"{where} differ from single sequences by {min(numbers):.2g} of the spread of their logprobs (at most {LIMIT:g} is exact)"


def _is_exact(value: object) -> bool:
    return isinstance(value, float) and value <= LIMIT


def _why(found: Mapping[str, Any]) -> str:
    """The reason why sequences are not packed."""
    states = [STATES[kind] for kind in found["layers"] if kind in STATES]
    if states:
        return f"{' and '.join(dict.fromkeys(states))} would keep state across packed sequences"
    packed = found[way("packed", True)]
    if isinstance(packed, str):
        return f"packed sequences cannot be computed ({packed})"
    return f"packed sequences would differ from single ones by {packed:.2g} of the spread of their logprobs"


@lru_cache(maxsize=64)
def _found(directory: Path, modified_ns: int) -> dict[str, Any]:
    """Return what the probe found for the config.json of this time; `atropos plan` asks a hundred times."""
    return probed(directory, PROBE, MODULE)
