"""Find what fits on a device, for each useful way to train a model with this trainer, by the run's own memory plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core.config.resolve import resolve_component
from atropos_core.errors import FitError, UnknownComponent
from atropos_core.launch.memory_plan import plan_memory, workloads
from atropos_core.launch.model_checks import check_dtypes
from atropos_core.launch.plan import make_plan
from atropos_core.launch.sizes import choose_sizes, fits_smallest
from atropos_core.models.model_size import context_tokens
from atropos_core.plugins.model_provider import PROMPT_TOKENS, BridgeProvider
from atropos_trainer_grpo.sizes import SEQUENCES

if TYPE_CHECKING:
    from atropos_core.config.run_file import RunConfig
    from atropos_core.launch.plan import Plan
    from atropos_core.plugins.manager import Plugins
    from atropos_core.plugins.provider import ResolvedModel


@dataclass(frozen=True)
class Way:
    """A way to train: options that override those of the run file."""

    name: str
    options: Mapping[str, Any]
    adapter: bool = False
    costs: str = ""
    on_gpu: bool = False  # it works only on a GPU

    @property
    def quantized(self) -> str:
        """The format to which its base must be rounded beforehand; "" if none."""
        return str(self.options.get("lora", {}).get("quantization", ""))


CHECKPOINTING = {"gradient_checkpointing": True}
EIGHT_BITS = {"optimizer": "adamw_8bit"}
QUANTIZED = {"lora": {"quantization": "nf4"}}
OFFLOADING = {**CHECKPOINTING, "activation_offloading": True}
HOST_MOMENTS = {"optimizer_offloading": True}
IN_8_BITS = {"lora": {"quantization": "int8"}}
HOLD_BASES = ("hf",)  # engines that can also hold the base in fewer bits
RECOMPUTES = "a third more compute"
COPIES = "layer inputs go to host memory and back"
# Options, and their values in a way that does not set them.
SWITCHES = {"optimizer": "adamw", **dict.fromkeys((*OFFLOADING, *HOST_MOMENTS), False)}
VARIED = ("lora", *SWITCHES)
WAYS = (  # cheapest first
    Way("whole model", {}),
    Way("whole model, checkpointing", CHECKPOINTING, costs=RECOMPUTES),
    Way("whole model, 8-bit moments", EIGHT_BITS, costs="moments are rounded; needs torchao"),
    Way("whole model, 8-bit moments, checkpointing", {**EIGHT_BITS, **CHECKPOINTING}, costs=f"both; {RECOMPUTES}"),
    Way(
        "whole model, offloading",
        {**OFFLOADING, **HOST_MOMENTS},
        costs=f"{RECOMPUTES}; {COPIES}; AdamW runs on the CPU",
        on_gpu=True,
    ),
    Way("LoRA", {"lora": {}}, adapter=True, costs="an adapter learns, the base does not"),
    Way("LoRA, checkpointing", {"lora": {}, **CHECKPOINTING}, adapter=True, costs=f"both; {RECOMPUTES}"),
    Way(
        "LoRA, checkpointing, offloading",
        {"lora": {}, **OFFLOADING},
        adapter=True,
        costs=f"all three; {COPIES}",
        on_gpu=True,
    ),
    Way(
        "LoRA, 8-bit base, checkpointing",
        {**IN_8_BITS, **CHECKPOINTING},
        adapter=True,
        costs=f"the base is rounded: `atropos quantize --format int8`; {RECOMPUTES}",
    ),
    Way(
        "LoRA, 4-bit base", QUANTIZED, adapter=True, costs="the base is rounded: `atropos quantize`; needs bitsandbytes"
    ),
    Way(
        "LoRA, 4-bit base, checkpointing",
        {**QUANTIZED, **CHECKPOINTING},
        adapter=True,
        costs=f"all three; {RECOMPUTES}",
    ),
    Way(
        "LoRA, 4-bit base, checkpointing, offloading",
        {**QUANTIZED, **OFFLOADING},
        adapter=True,
        costs=f"all four; {COPIES}",
        on_gpu=True,
    ),
)


@dataclass(frozen=True)
class Fitted:
    """One way on this device."""

    way: Way
    bridge: str
    context: int  # tokens of the longest prompt with its reply that fit, one sequence at a time; 0: none
    microbatch: int  # tokens that a run would take at once at the wanted context; 0: not even one sequence fits
    needed: Mapping[str, int]  # bytes by device, with that micro-batch
    sizes: Mapping[str, Any] = field(default_factory=dict)  # that a run would choose and are not defaults, by path
    refused: str = ""  # the reason why this way is impossible

    def sequences(self, wanted: int) -> int:
        return self.microbatch // wanted


class Fitting:
    """The ways that fit one configuration. `available`: bytes by device, if known."""

    def __init__(
        self,
        config: RunConfig,
        model: ResolvedModel,
        plugins: Plugins,
        directory: Path,
        available: Mapping[str, int],
        given: Collection[str] = (),
        *,
        own_bridge: bool = False,
    ) -> None:
        """`given`: paths that are set, whose values stay. `own_bridge`: keep the configuration's bridge, even if only another one
        carries a way. Raises ConfigError, UnknownComponent for options that no way could have."""
        for kind in ("engine", "trainer", "bridge"):
            resolve_component(plugins.registry, kind, kind, getattr(config, kind))
        self._own_bridge = own_bridge
        self._config = config
        self._model = model
        self._plugins = plugins
        self._directory = directory
        self._available = available
        self._given = {path for path in given if path.removeprefix("trainer.") not in SWITCHES}
        positions = context_tokens(model.directory) or 1 << 20
        self.longest = positions
        self.wanted = min(PROMPT_TOKENS + config.sampling.max_tokens, positions)

    def each(self, ways: Sequence[Way] = WAYS) -> list[Fitted]:
        """Fit the ways that this device supports."""
        gpu = any(device.startswith("cuda") for device in self._available)
        return [self.fitted(way) for way in ways if gpu or not way.on_gpu]

    def fitted(self, way: Way) -> Fitted:
        """Fit one way. Raises the error for which the run file itself is refused."""
        bridges = self._bridges(way)
        if kept := self._kept(way):
            return Fitted(way, bridges[0] if bridges else "", 0, 0, {}, refused=f"{kept} is set: remove it for this")
        own = self._config.bridge.use
        refused = (
            f"bridge {own!r} does not carry it" if self._own_bridge else "no installed bridge carries it to this engine"
        )
        for bridge in bridges:
            try:
                plan = self._plan(way, bridge)
                check_dtypes(plan, workloads(plan, self._directory, self._available))
            except (FitError, UnknownComponent) as error:
                refused = str(error).splitlines()[0]
                continue
            return self._searched(way, bridge, plan)
        return Fitted(way, bridges[0] if bridges else "", 0, 0, {}, refused=refused)

    def trainer_options(self, way: Way) -> Mapping[str, Any]:
        """All trainer options of this way, including those that the run file sets otherwise."""
        given = self._config.trainer.options
        back = {name: usual for name, usual in SWITCHES.items() if given.get(name, usual) != usual}
        lora = {"lora": {**(given.get("lora") or {}), **way.options["lora"]}} if way.adapter else {}
        return {**back, **way.options, **lora}

    def rounded_already(self, way: Way) -> bool:
        """True if the model is already on the grid of this way."""
        return bool(way.quantized) and way.quantized == self._lora.get("quantization")

    @property
    def _lora(self) -> Mapping[str, Any]:
        return self._config.trainer.options.get("lora") or {}

    def _kept(self, way: Way) -> str:
        """An option of the run file that this way excludes and that no flag removes."""
        given = self._config.trainer.options
        if given.get("lora") is not None and not way.adapter:
            return "trainer.lora"
        if self._lora.get("quantization") and not way.quantized:
            return "trainer.lora.quantization"
        if given.get("checkpointed_layers") and "gradient_checkpointing" not in way.options:
            return "trainer.checkpointed_layers"
        return ""

    def engine_options(self, way: Way) -> Mapping[str, Any]:
        """Engine options that this way needs in addition to the engine's own."""
        if self._config.engine.use in HOLD_BASES and way.quantized:
            return {"quantization": way.quantized}
        return {}

    def _searched(self, way: Way, bridge: str, plan: Plan) -> Fitted:
        given = {*self._given, *(f"trainer.{name}" for name in SWITCHES)}
        context = _largest(
            PROMPT_TOKENS + 1,
            self.longest,
            lambda tokens: fits_smallest(_with(plan, tokens), given, self._directory, self._available),
        )
        sized = choose_sizes(_with(plan, self.wanted), given, self._directory, self._available)
        needed = plan_memory(sized, self._directory, self._available).needed()
        at_once = 0
        if sized.sizes.fit:  # a longer sequence is a micro-batch with nothing else
            at_once = max(int(sized.single["trainer"].options.model_dump()["tokens_per_microbatch"]), self.wanted)
        return Fitted(way, bridge, context, at_once, needed, sized.sizes.changed)

    def _bridges(self, way: Way) -> list[str]:
        """The run's own bridge first, then other installed ones that carry what is trained."""
        providers = [offer.provider for offer in self._plugins.registry.offers("bridge")]
        carrying = [
            one.name
            for one in providers
            if isinstance(one, BridgeProvider) and ("adapter" in one.transports(one.options())) == way.adapter
        ]
        own = self._config.bridge.use
        if self._own_bridge:
            return [name for name in carrying if name == own]
        return sorted(carrying, key=lambda name: (name != own, name))

    def _plan(self, way: Way, bridge: str) -> Plan:
        trainer, own = self._config.trainer, self._config.bridge
        kept = {name: value for name, value in trainer.model_dump().items() if name not in VARIED}
        changed: dict[str, Any] = {"trainer": type(trainer).model_validate({**self.trainer_options(way), **kept})}
        if engine := self.engine_options(way):
            changed["engine"] = self._config.engine.model_validate({**self._config.engine.model_dump(), **engine})
        if bridge != own.use:
            changed["bridge"] = type(own)(use=bridge)
        config = self._config.model_copy(update=changed)
        return make_plan(config, self._model, self._plugins, rollouts=False)


def best(found: Sequence[Fitted], wanted: int) -> Fitted | None:
    """The first, which is cheapest, with room for SEQUENCES of the context; else the one with the most room."""
    fit = [one for one in found if one.microbatch >= wanted]
    return next(
        (one for one in fit if one.sequences(wanted) >= SEQUENCES),
        max(fit, key=lambda one: one.microbatch, default=None),
    )


def _with(plan: Plan, context: int) -> Plan:
    sampling = plan.config.sampling.model_copy(update={"max_tokens": max(context - PROMPT_TOKENS, 1)})
    return replace(plan, config=plan.config.model_copy(update={"sampling": sampling}))


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from `least` to `most` that fits, if every smaller one also fits; 0 if `least` does not."""
    if least > most or not fits(least):
        return 0
    if fits(most):
        return most
    low, high = least, most
    while high - low > max(1, low // 100):  # to within 1 %
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
