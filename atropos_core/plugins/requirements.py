"""What a component needs before it is built: this version of core, modules, devices."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from atropos_core import __version__
from atropos_core.errors import FitError, PluginError
from atropos_core.plugins.provider import CORE_API, Offer


def check_core_api(offer: Offer) -> None:
    wanted = offer.provider.core_api
    if wanted == CORE_API:
        return  # this core's own, as most have it: packaging is not worth its start
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        fits = SpecifierSet(wanted).contains(__version__, prereleases=True)
    except InvalidSpecifier as error:
        raise PluginError(
            f"{offer.kind} {offer.provider.name!r} of {offer.distribution} has core_api={wanted!r}, which is no version range"
        ) from error
    if not fits:
        raise PluginError(
            f"{offer.kind} {offer.provider.name!r} of {offer.distribution} needs atropos-core {wanted}; this is {__version__}.",
            remedy=f"Install a version of {offer.distribution} made for atropos-core {__version__}.",
        )


def cuda_devices() -> int:
    """How many CUDA devices this process may use, by the device files and CUDA_VISIBLE_DEVICES: no framework is
    imported to ask. None where the installed torch is a CPU build."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return 0
    try:
        if version("torch").endswith("+cpu"):
            return 0
    except PackageNotFoundError:
        pass
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def check_requires(offer: Offer, devices: Iterable[str] = ()) -> None:
    """Raise FitError where something that the component needs is not on this machine."""
    for need in sorted(offer.provider.requires):
        if need == "cuda":
            if not cuda_devices():
                raise FitError(f"{offer.kind} {offer.provider.name!r} needs a CUDA device, and this machine has none.")
        elif not is_installed(need):
            what = "package" if "-" in need else "module"
            raise FitError(
                f"{offer.kind} {offer.provider.name!r} needs the {what} {need!r}, which is not installed.",
                remedy=f"pip install {need}",
            )


def is_installed(need: str) -> bool:
    """Of a module, or of a package that has another name than its modules: by the dash in it."""
    if "-" not in need:
        return importlib.util.find_spec(need) is not None
    try:
        return bool(version(need))
    except PackageNotFoundError:
        return False
