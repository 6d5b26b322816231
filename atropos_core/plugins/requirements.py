"""Checks before a component is built: its version of core, its modules, its devices."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from atropos_core import __version__
from atropos_core.errors import FitError, PluginError
from atropos_core.plugins.offers import Offer
from atropos_core.plugins.provider import CORE_API


def check_core_api(offer: Offer) -> None:
    wanted = offer.provider.core_api
    if wanted == CORE_API:
        return  # this core's own, as most have it: packaging is not worth its start
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        fits = SpecifierSet(wanted).contains(__version__, prereleases=True)
    except InvalidSpecifier as error:
        raise PluginError(
            f"{offer.kind} {offer.provider.name!r} of {offer.distribution} has core_api={wanted!r}, which is not a version range"
        ) from error
    if not fits:
        raise PluginError(
            f"{offer.kind} {offer.provider.name!r} of {offer.distribution} needs atropos-core {wanted}; this is {__version__}.",
            remedy=f"Install a version of {offer.distribution} made for atropos-core {__version__}.",
        )


def cuda_devices() -> int:
    """Return how many CUDA devices this process may use, from device files and CUDA_VISIBLE_DEVICES, without importing a
    framework. 0 if the installed torch is a CPU build."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return 0
    try:
        if version("torch").endswith("+cpu"):
            return 0
    except PackageNotFoundError:
        pass
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def check_requires(offer: Offer, devices: Iterable[str] = ()) -> None:
    """Raise FitError if this machine lacks something that the component needs."""
    for need in sorted(offer.provider.requires):
        if need == "cuda":
            if not cuda_devices():
                raise FitError(f"{offer.kind} {offer.provider.name!r} needs a CUDA device, and this machine has none.")
        elif not is_installed(need):
            what = "package" if "-" in need else "module"
            extra = offer.provider.extra
            raise FitError(
                f"{offer.kind} {offer.provider.name!r} needs the {what} {need!r}, which is not installed.",
                remedy=f"pip install '{offer.distribution}[{extra}]'" if extra else f"pip install {need}",
            )


def is_installed(need: str) -> bool:
    """Return True if a module is installed, or a package, which is recognised by a dash in its name."""
    if "-" not in need:
        return importlib.util.find_spec(need) is not None
    try:
        return bool(version(need))
    except PackageNotFoundError:
        return False
