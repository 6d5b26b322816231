"""`python -m tests.gpu.head DEVICE`: logprobs by the language-model head, with Triton kernels and by torch, in one process."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from typing import Any

from tests.gpu.training import answer

VALUES = 1e-5  # nats: they are computed in fp32
BOUND = {"float32": 1e-5, "bfloat16": 0.02}  # of gradients: the norm of the difference, over the norm


async def compared(device: str, *, small: bool) -> dict[str, Any]:
    """`apart`: by dtype, how far from float64 each value and gradient is. `timed`: one pass and its backward pass by each way, s, GiB."""
    found: dict[str, Any] = await answer("tests.gpu.head", {"device": device, "small": small})
    return found


def given(rows: int, width: int, vocabulary: int, dtype: Any, device: str) -> tuple[Any, ...]:
    import torch

    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=device).to(dtype).requires_grad_()
    weight = (3 * torch.randn(vocabulary, width, device=device) / width**0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    back = torch.randn(2, rows, device=device)
    return hidden, weight, targets, back


def apart(dtype: Any, device: str) -> dict[str, float]:
    """From float64, of a head that is rounded to `dtype`; logits are taken as that dtype rounds them."""
    import torch

    from atropos_trainer_grpo.logprobs import by_kernels

    hidden, weight, targets, back = given(64, 128, 5003, dtype, device)
    temperature = torch.linspace(0.5, 1.5, 64, device=device)
    logprobs, entropy = by_kernels(hidden, weight, None, targets, temperature, 40)
    (logprobs * back[0] + entropy * back[1]).sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    product = exact[0] @ exact[1].T
    rounded = product + (torch.nn.functional.linear(hidden, weight).double() - product).detach()
    logs = torch.log_softmax(rounded / temperature.double()[:, None], -1)
    values = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    (values[0] * back[0].double() + values[1] * back[1].double()).sum().backward()
    found = {
        name: float((mine.detach().double() - theirs.detach()).abs().max())
        for name, mine, theirs in zip(("logprobs", "entropy"), (logprobs, entropy), values, strict=True)
    }
    for name, mine, theirs in zip(("hidden", "weight"), (hidden, weight), exact, strict=True):
        found[f"gradient of {name}"] = float((mine.grad.double() - theirs.grad).norm() / theirs.grad.norm())
    return found


def timed(device: str, small: bool) -> dict[str, dict[str, float]]:
    """Of 16,384 tokens at the head of Qwen3-0.6B, in bfloat16: forward and backward, the best of five."""
    import torch

    from atropos_trainer_grpo import logprobs as ours

    shape = (64, 32, 640) if small else (16_384, 1024, 151_936)
    hidden, weight, targets, back = given(*shape, torch.bfloat16, device)
    ways = {
        "kernels": lambda: ours.by_kernels(hidden, weight, None, targets, None, 8192)[0],
        "torch": lambda: ours.by_torch(hidden, weight, None, targets, None, 8192, None, None, ours.PLAIN, None, None)[
            0
        ],
    }
    on_gpu = device != "cpu"
    if on_gpu and importlib.util.find_spec("trl") and importlib.util.find_spec("trl.kernels"):
        from trl.kernels import chunked_logprob as theirs

        ways["TRL"] = lambda: theirs.ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, 1.0, 8192, None, 1.0, ("entropy",)
        )[0]
    found: dict[str, dict[str, float]] = {}
    for name, way in ways.items():
        seconds = []
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        for _ in range(2 if small else 5):
            hidden.grad = weight.grad = None
            if on_gpu:
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            (way() * back[0]).sum().backward()
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
        most = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
        found[name] = {"seconds": min(seconds), "gib": most / 2**30}
    return found


def main() -> None:
    asked = json.loads(sys.argv[1])
    import torch

    device = asked["device"]
    torch.backends.cuda.matmul.allow_tf32 = False
    away = {name: apart(getattr(torch, name), device) for name in BOUND}
    print(json.dumps({"apart": away, "timed": timed(device, asked["small"])}), flush=True)


if __name__ == "__main__":
    main()
