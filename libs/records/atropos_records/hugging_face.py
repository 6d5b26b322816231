"""Upload an export to the Hugging Face Hub, as one commit of a new repository, with the token that huggingface_hub finds (`hf auth
login`, HF_TOKEN)."""

from __future__ import annotations

import json
import re
from typing import Any

from atropos_core.errors import AccessRefused, ApiError, ConfigError, FitError
from atropos_core.scripting.results import Exported, ExportedPolicy
from atropos_core.storage.run_records import RunRecords
from atropos_records.model_card import hub_base

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Hub:
    """The repository to create. Raises before anything is exported: ConfigError for its name, FitError without the library,
    AccessRefused if the user is not logged in, ApiError if the hub does not answer."""

    def __init__(self, name: str, *, public: bool) -> None:
        if not NAME.fullmatch(name):
            raise ConfigError(f"--push {name!r} is not a repository.", remedy="As --push OWNER/NAME")
        try:
            import huggingface_hub
        except ModuleNotFoundError as error:
            raise FitError(
                "--push needs the module huggingface_hub, which is not installed.",
                remedy="pip install 'atropos-records[export]'",
            ) from error
        self.name, self._public = name, public
        self._library: Any = huggingface_hub
        self._api: Any = huggingface_hub.HfApi(library_name="atropos")
        if not huggingface_hub.get_token():
            raise AccessRefused(
                "--push: you are not logged in to the hub.", remedy="hf auth login, or export HF_TOKEN=..."
            )
        self._call("whoami")

    def push(self, made: Exported | ExportedPolicy, records: RunRecords) -> str:
        """Upload, and return the address of the new repository. Raises ApiError, and ConfigError if it exists, or for an adapter that
        only this machine could load."""
        kind = "model" if isinstance(made, ExportedPolicy) else "dataset"
        add = self._library.CommitOperationAdd
        if isinstance(made, ExportedPolicy):
            if made.kind == "adapter" and hub_base(records) is None:
                raise ConfigError(
                    f"the adapter in {made.path} names a base model that is a directory of this machine: others could not load it.",
                    remedy="Push a whole model: --merged.",
                )
            files = [add(path_in_repo=name, path_or_fileobj=str(made.path / name)) for name in made.files]
        else:
            card = dataset_card(made, records).encode()
            files = [
                add(path_in_repo=made.path.name, path_or_fileobj=str(made.path)),
                add(path_in_repo="README.md", path_or_fileobj=card),
            ]
        if self._call("repo_exists", self.name, repo_type=kind):
            raise ConfigError(
                f"the hub has a {kind} {self.name} already.", remedy="Name another one, or delete it there."
            )
        url = self._call("create_repo", self.name, repo_type=kind, private=not self._public)
        self._call(
            "create_commit", self.name, files, repo_type=kind, commit_message=f"atropos export --as {_form(made)}"
        )
        return str(url)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        from huggingface_hub.errors import HfHubHTTPError

        # of the HTTP library that this version of huggingface_hub stands on, which is not the same in all
        of_library = (base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
        no_answer: tuple[type[Exception], ...] = (OSError, *of_library)  # OSError: offline mode as well
        try:
            return getattr(self._api, method)(*arguments, **options)
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            reason = str(error).strip().splitlines()[0]
            if status in (401, 403):
                raise AccessRefused(
                    f"the hub refused {method}: {reason}", remedy="hf auth login, with a token that may write"
                ) from error
            raise ApiError(f"the hub refused {method}: {reason}") from error
        except no_answer as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ApiError(
                f"the hub gave no answer to {method}: {reason}", remedy="HF_HUB_OFFLINE must not be set."
            ) from error


def _form(made: Exported | ExportedPolicy) -> str:
    return "hf" if isinstance(made, ExportedPolicy) else made.form


def dataset_card(made: Exported, records: RunRecords) -> str:
    """Return README.md of a data set, with the metadata by which `load_dataset` finds its file."""
    names = ", ".join(f"`{name}`" for name in sorted(records.config.get("environment", {})))
    metadata = {
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": made.path.name}]}],
        "tags": ["atropos", "reinforcement-learning", made.form],
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in metadata.items()]
    left_out = [f"- {count:,}: {reason}" for reason, count in made.left_out.items()]
    return "\n".join(
        [
            "---", *lines, "---", "",
            f"# Rollouts on {names or 'tasks of workers'}", "",
            f"{made.written:,} rows, written by `atropos export --as {made.form}` from a run of Atropos on {names or 'tasks of workers'}.",
            *(["", "Left out:", "", *left_out] if left_out else []), "",
        ]
    )  # fmt: skip
