"""The contract of an adapter: it reports its versions, and writes the same files each time, only where it was told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp

from atropos_core.config.run_file import Layer, RunConfig, load
from atropos_core.interfaces import Adapter, Finding
from atropos_testing.stages import StagedContract

ENVIRONMENT = "atropos_testing.samples:TwoSums"


class AdapterContract(StagedContract):
    """Checks one adapter on a run of one small environment."""

    made: Adapter
    beside_rollouts = False  # `atropos adapter` has a process to itself; a doctor may start a cluster
    stages = {  # noqa: RUF012 - ClassVar of the base
        "versions": ("names and versions, as texts", "versions() gives the version of each package that it stands on, by name."),
        "doctor": ("findings, each with a remedy where something is wrong", "doctor() gives Findings; what is not ok has a remedy."),
        "exports": (
            "files that are there, in the directory that was named",
            "export(run, out) writes only below `out`, and returns the path of each file.",
        ),
        "same again": ("the same files with the same content", "Leave the time, chance and absolute paths out of what is written."),
    }  # fmt: skip

    async def check_versions(self) -> Sequence[str]:
        found = self.made.versions()
        if not isinstance(found, Mapping):
            return [f"versions() gave {found!r:.80}"]
        return [f"{name!r} has {version!r}" for name, version in found.items() if not isinstance(version, str)]

    async def check_doctor(self) -> Sequence[str]:
        found = list(self.made.doctor())
        strangers = [f"doctor() gave {one!r:.80}" for one in found if not isinstance(one, Finding)]
        return strangers or [
            f"{one.subject!r} is not ok, and has no remedy" for one in found if one.ok is False and not one.remedy
        ]

    async def check_exports(self) -> Sequence[str]:
        before = _everything(self.subject.context.directory)
        out = self._new_directory()
        paths = self.made.export(_run(), out)
        wrong = [f"{path} is not there" for path in paths if not Path(path).is_file()]
        wrong += [
            f"{path} is not below the directory that was named" for path in paths if out not in Path(path).parents
        ]
        if not paths:
            wrong.append("nothing was written")
        beside = {
            path
            for path in _everything(self.subject.context.directory) - before
            if path != out and out not in path.parents
        }
        return [*wrong, *(f"{path} was written outside it" for path in sorted(beside))]

    async def check_same_again(self) -> Sequence[str]:
        one, other = self._new_directory(), self._new_directory()
        written = []
        for out in (one, other):
            paths = self.subject.make().export(_run(), out)
            written.append(
                {
                    str(Path(path).relative_to(out)): Path(path).read_bytes().replace(str(out).encode(), b"OUT")
                    for path in paths
                }
            )
        names = sorted(written[0].keys() | written[1].keys())
        return [f"{name} differs" for name in names if written[0].get(name) != written[1].get(name)]

    def _new_directory(self) -> Path:
        return Path(mkdtemp(dir=self.subject.context.directory))


def _run() -> RunConfig:
    return load([Layer("check", {"model": "toy", "environment": {"sums": {"use": ENVIRONMENT}}})]).config


def _everything(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))
