"""The official client of a Tinker server. Its key comes from TINKER_API_KEY only, and goes to the server only."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from atropos_core.errors import ConfigError, DeadlineExceeded, RemoteError
from atropos_core.interfaces import ModelInfo
from atropos_core.rollouts.tokenizer import fingerprint

T = TypeVar("T")

OPEN_S = 600.0
WORK_S = 3600.0  # a hosted service may let a request wait for its turn
CLOSE_S = 20.0


def check_environment(role: str) -> None:
    """Raises ConfigError unless the environment says which key to use."""
    key = os.environ.get("TINKER_API_KEY", "")
    if not key.startswith("tml-"):
        raise ConfigError(
            f"{role} 'tinker' takes its key from the environment variable TINKER_API_KEY, which "
            + ("does not begin with tml-." if key else "is not set."),
            remedy="export TINKER_API_KEY=tml-... `atropos tinker` takes any key of this form. Set TINKER_BASE_URL "
            "to the address that it prints; without it, calls go to the hosted service.",
        )


class Service:
    """One session at the server."""

    def __init__(self, session: Any, capabilities: Any) -> None:
        self.session = session  # tinker.ServiceClient, Any because the package is optional
        self._capabilities = capabilities

    @classmethod
    async def open(cls, role: str) -> Service:
        """Begin a session. Raises ConfigError without a key, RemoteError if the server does not answer."""
        check_environment(role)
        os.environ.setdefault("TINKER_TELEMETRY", "0")  # the client sends usage data unless this says no
        import tinker

        key, url = os.environ["TINKER_API_KEY"], os.environ.get("TINKER_BASE_URL") or None
        session = tinker.ServiceClient(api_key=key, base_url=url)
        rest = await asyncio.to_thread(session.create_rest_client)  # constructors wait for the network
        return cls(session, await answer("capabilities", rest.get_server_capabilities(), OPEN_S))

    def model(self, named: str, role: str) -> str:
        """Return the server's name of the model to use. Raises ConfigError if it has no such model, or several and none is named."""
        offered = [one.model_name for one in self._capabilities.supported_models if one.model_name]
        if named in offered or (not named and len(offered) == 1):
            return named or str(offered[0])
        listed = ", ".join(offered[:20]) or "none"
        raise ConfigError(
            f"the Tinker server has no model {named!r}: it offers {listed}."
            if named
            else f"the Tinker server offers {len(offered)} models, and {role}.base_model names none of them: {listed}.",
            remedy=f"--set {role}.base_model=NAME",
        )

    async def close(self) -> None:
        """End the session, within a bound: a server also ends a session that it no longer hears from."""
        try:
            await answer("the end of the session", self.session.close("success"), CLOSE_S)
        except (DeadlineExceeded, RemoteError):
            return


async def answer(what: str, future: Awaitable[T], deadline_s: float) -> T:
    """Wait for an answer of the server. Raises DeadlineExceeded, or RemoteError with the server's own message."""
    import tinker

    try:
        async with asyncio.timeout(deadline_s):
            return await future
    except TimeoutError:
        raise DeadlineExceeded(f"the Tinker server has not answered {what} within {deadline_s:g} s") from None
    except tinker.TinkerError as error:
        said = str(error).replace(os.environ.get("TINKER_API_KEY", "-"), "[key]")
        raise RemoteError(f"the Tinker server has failed {what}: {type(error).__name__}: {said}") from None


def described(model: Path, dtype: str) -> ModelInfo:
    """Return what the local model directory says of the model. The weights are at the server, and are not read here."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    return ModelInfo(
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        parameters=None,
        vocabulary=int(text["vocab_size"]),
        dtype=dtype,
        device="server",
        tokenizer=fingerprint(model),
    )
