"""The flags of `atropos serve`."""

from __future__ import annotations

import inspect

from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.roles.serve_command import serve


def test_a_flag_that_is_left_out_is_the_servers_own_default() -> None:
    """The command writes them down again: pydantic is not imported to list commands."""
    flags = {name: one.default for name, one in inspect.signature(serve).parameters.items()}
    for name, option in ServeOptions.model_fields.items():
        if name in flags:
            default = () if flags[name] is None and name == "cors" else flags[name]
            assert default == option.default, name
    assert flags.keys() <= ServeOptions.model_fields.keys()
