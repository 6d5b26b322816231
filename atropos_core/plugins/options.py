"""The base of every component's options. Plugins are listed without importing this, since it imports pydantic."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from atropos_core.errors import ConfigError
from atropos_core.plugins.option_paths import without_folders


class NoBooleanIsANumber(BaseModel):
    """pydantic would take True as 1, but `--set sampling.max_tokens=true` has no clear meaning."""

    model_config = ConfigDict(defer_build=True)  # building one searches all of site-packages for pydantic's plugins

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        if any(isinstance(one, bool) for one in (value if isinstance(value, list | tuple) else [value])):
            wanted = set(_types_in(cls.model_fields[str(info.field_name)].annotation))
            if wanted & {int, float} and bool not in wanted:
                raise ValueError("Input should be a number")
        return value


def _types_in(annotation: Any) -> list[Any]:
    parts = get_args(annotation)
    return [one for part in parts for one in _types_in(part)] if parts else [annotation]


class Options(NoBooleanIsANumber):
    """The base of every component's options: unknown keys are refused, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _written_as_text(cls, values: Any) -> Any:
        return without_folders(values, cls.model_fields)

    def check_files(self) -> None:
        """Raise DataError if a file that an option names is missing or cannot be read. Called before anything is printed or
        started, so it reads little."""

    def changed(self, *names: str) -> list[str]:
        """Return those of `names` that differ from their default. (`model_fields_set` would contain all of them after a resume,
        because the saved config.toml has every option.)"""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]

    def refuse_idle(self, applies: bool, where: str, *names: str) -> None:
        """Raises ValueError for the first of `names` that was changed, unless `applies`. Otherwise the user would believe that
        the option does something. `where` says when it has no effect, and what it would need."""
        if not applies and (idle := self.changed(*names)):
            raise ValueError(f"{idle[0]} has no effect {where}: remove it")

    def refuse_for(self, command: str, *names: str) -> None:
        """Raises ConfigError for the first of `names` that was changed, because `command` does not use it."""
        if idle := self.changed(*names):
            raise ConfigError(f"{idle[0]} has no effect on {command}.", remedy=f"Leave {idle[0]} out.")


class NoOptions(Options):
    """For components with nothing to configure."""
