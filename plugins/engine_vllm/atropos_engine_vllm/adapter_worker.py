"""Compute named adapters exactly inside vLLM's worker (part of `--worker-extension-cls`).

vLLM 0.32 has two faults that matter here. On a CPU, a row without an adapter is computed with the adapter in the last slot. On any device,
logprobs of a prompt take the head's adapter from the wrong rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

OPEN = "atropos_open_adapters"
LEFT_OUT = "atropos_left_out"


class AdapterWorker:
    """A mixin for vLLM's worker class; `/collective_rpc` calls its methods by OPEN and LEFT_OUT."""

    model_runner: Any
    device: Any

    def atropos_open_adapters(self) -> dict[str, bool]:
        """Repair what is wrong for adapters. May be called again. `head`: the model can have adapters of its head. `head_scores`: with
        such an adapter, it can also score prompts."""
        manager = self.model_runner.lora_manager._adapter_manager
        if str(self.device).startswith("cpu"):
            for kernels in manager.punica_wrapper_mapping.values():
                kernels.__class__ = _rows_by_adapter()
        runner = type(self.model_runner)
        scores = hasattr(runner, "_get_prompt_logprobs_dict")  # vLLM's second model runner has another way
        if scores:
            own = partial(prompt_logprobs, self.model_runner, runner._get_prompt_logprobs_dict)
            self.model_runner._get_prompt_logprobs_dict = own
        return {"head": any(name.endswith("lm_head") for name in manager.modules), "head_scores": scores}

    def atropos_left_out(self, number: int) -> list[str]:
        """Return the layers of a loaded adapter that vLLM does not apply: it does so without an error."""
        manager = self.model_runner.lora_manager._adapter_manager
        return sorted(set(manager.get_adapter(number).loras) - set(manager.modules))


def prompt_logprobs(
    runner: Any, own: Callable[..., Mapping[str, Any]], hidden_states: Any, scheduled: Mapping[str, int]
) -> dict[str, Any]:
    """Do what vLLM's `_get_prompt_logprobs_dict` does, one request at a time, with the adapter of each row set before its logits.
    vLLM sets the adapters of the rows that are sampled from: one for each request, while a prompt has a row for each token."""
    waiting = runner.num_prompt_logprobs
    found: dict[str, Any] = {}
    for request, likeliest in list(waiting.items()):
        if (computed := scheduled.get(request)) is None:
            continue
        state = runner.requests[request]
        rows = min(computed, len(state.prompt_token_ids or ()) - state.num_computed_tokens - 1)
        if rows > 0:
            adapter = state.lora_request
            mapping = (adapter.lora_int_id if adapter else 0,) * rows
            runner._set_active_loras(mapping, mapping, {adapter} if adapter else set())
        runner.num_prompt_logprobs = {request: likeliest}
        found |= own(runner, hidden_states, scheduled)
        if request not in runner.num_prompt_logprobs:
            del waiting[request]
        runner.num_prompt_logprobs = waiting
    return found


def add_adapters(
    y: Any, x: Any, a: Sequence[Any], b: Sequence[Any], slots: Any, scale: float, widths: Sequence[int]
) -> None:
    """Add to the outputs y [rows, outputs] of a layer what adapters make of its inputs x [rows, inputs].

    `slots` [rows or more] gives each row's adapter, -1 for none. The layer may consist of several, such as queries, keys and values, of
    `widths` outputs: each has its matrices a [adapters, 1, rank, inputs] and b [adapters, 1, outputs, rank]."""
    slots = slots[: len(x)]
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        rows, start = (slots == slot).nonzero()[:, 0], 0
        chosen = x[rows].float()
        for down, up, width in zip(a, b, widths, strict=True):
            shrunk = scale * (chosen @ down[slot, 0].float().T)
            y[rows, start : start + width] += (shrunk.to(y.dtype) @ up[slot, 0].to(y.dtype).T)[:, :width]
            start += width


def _rows_by_adapter() -> type:
    """Return a class of kernels for a CPU. vLLM's own copy an adapter's matrices once for each row: with a head of 49,152 tokens and rank
    32, that is 6 MB a row."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    class RowsByAdapter(PunicaWrapperCPU):  # type: ignore[misc] # vLLM need not be installed where types are checked
        """Multiplies the rows of each adapter with its matrices. Rows without an adapter stay as they are."""

        def add_lora_linear(
            self, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, output_slices: Any, **_: Any
        ) -> None:
            x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
            add_adapters(y, x, lora_a_stacked, lora_b_stacked, self.token_lora_indices, scale, output_slices)

        def add_lora_logits(
            self, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, **_: Any
        ) -> None:
            width = min(y.shape[-1], lora_b_stacked.shape[-2])  # they may be padded to different sizes
            add_adapters(y, x, [lora_a_stacked], [lora_b_stacked], self.sampler_indices, scale, [width])

    return RowsByAdapter
