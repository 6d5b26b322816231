"""Components that a run file names by their code: `pkg.mod:Name` or `./file.py:Name`. Allowed wherever a plugin's name is."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from atropos_core.errors import ConfigError, EndsProcess, PluginError
from atropos_core.guards.exits import contained
from atropos_core.plugins.offers import KINDS, PROVIDERS
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from pydantic import BaseModel

_FILE = "atropos_file_"  # prefix of the names of modules that were loaded from a file
CALLED = ("reward", "transform")  # kinds that are one call: a coroutine function is one
MOVES_WEIGHTS = ("engine", "trainer", "bridge")
HOSTED = ("engine", "trainer", "reward")  # kinds that may run in a child process
OBJECT = "object:"  # prefix of the names of Python objects that no other process could import
WHERE = "In a run file, a relative path starts at the folder of that file; in a flag, in the current directory."


def is_reference(name: str) -> bool:
    """Return True if `name` refers to code rather than to a plugin's component."""
    return ":" in name or name.endswith(".py")


def provider_at(kind: str, reference: str) -> Provider[Any]:
    """Return a Provider for the component behind a reference. Raises ConfigError, PluginError."""
    return provider_of(kind, load_reference(reference, kind), reference)


def provider_of(kind: str, made: Any, name: str) -> Provider[Any]:
    """Return a Provider for a Python object: a class of that kind, an instance, a function that makes one, a coroutine function
    (if the kind is one call), or a Provider, which is used as it is. Raises ConfigError."""
    if isinstance(made, Provider):
        return dataclasses.replace(made, name=name)
    if kind in CALLED and inspect.isroutine(made):
        if kind == "reward" and "completions" in inspect.signature(made).parameters:
            raise ConfigError(
                f"{name!r} takes `completions`, as TRL's reward functions do; a reward here takes (task, episodes).",
                remedy=f"TRL's scores rows as it is: --env dataset:FILE, with score = \"{name}\" among that environment's options, or "
                f'score = ["numeric", "{name}"] for a sum.',
            )
        if not inspect.iscoroutinefunction(made):
            raise ConfigError(f"{name!r} is a function, and a {kind} is awaited.", remedy="Begin it with `async def`.")
        return _provider(kind, made, name, None, lambda values, context: made)
    if inspect.isclass(made) or (inspect.isroutine(made) and kind != "loss"):
        if inspect.isclass(made):
            _check_class(kind, made, name)
        from pydantic import BaseModel

        options = getattr(made, "Options", None)
        if options is not None and not (inspect.isclass(options) and issubclass(options, BaseModel)):
            raise ConfigError(
                f"{name!r}: Options is {options!r}.",
                remedy="Derive it from atropos_core.Options: its fields are the options.",
            )
        return _provider(kind, made, name, options, lambda values, context: construct(made, values, context))
    _check_class(kind, type(made), name, made)
    return _provider(kind, made, name, None, lambda values, context: made)


def construct(made: Any, values: Any, context: RunContext) -> Any:
    """Call `made` with its options first, if it has any, and with the RunContext if it has a parameter `context`."""
    from atropos_core.plugins.options import NoOptions

    options = () if isinstance(values, NoOptions) else (values,)
    try:
        takes_context = "context" in inspect.signature(made).parameters
    except ValueError:  # of a class written in C
        takes_context = False
    return made(*options, **({"context": context} if takes_context else {}))


def place_of(made: Any) -> str | None:
    """Return a name by which a process in any directory can import this class or function: `pkg.mod:Name` if its module is
    installed, else `/path/file.py:Name`. None for an instance, and for code of a function body, a notebook or the main program."""
    module, name = getattr(made, "__module__", None), getattr(made, "__qualname__", None)
    if not (inspect.isclass(made) or inspect.isfunction(made)) or not module or not name or module == "__main__":
        return None
    if getattr(sys.modules.get(module), name, None) is not made:
        return None
    file = str(getattr(sys.modules[module], "__file__", None))
    if file.endswith(".py") and os.path.isfile(file) and not _is_installed(file):
        return f"{os.path.abspath(file)}:{name}"
    top = module.partition(".")[0]
    found = any(
        finder.find_spec(top, None) for finder in sys.meta_path
    )  # not in sys.modules, which is this process's own
    return f"{module}:{name}" if found else None


def _is_installed(file: str) -> bool:
    """Return True if every Python of this environment can import it, from any directory and with any PYTHONPATH."""
    folders = {sysconfig.get_path(which) for which in ("stdlib", "platstdlib")}
    for packages in {*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")}:
        folders.add(packages)
        for listed in Path(packages).glob("*.pth"):  # of packages that are installed to be edited
            folders |= {line for line in listed.read_text(errors="replace").splitlines() if os.path.isabs(line)}
    return any(Path(file).resolve().is_relative_to(Path(folder).resolve()) for folder in folders)


def kind_of(made: Any) -> str | None:
    """Return the kind that a class or an instance derives from; None if unclear."""
    cls = made if inspect.isclass(made) else type(made)
    found = [kind for kind in KINDS if _interface(kind) in cls.__mro__]
    return found[0] if found else "loss" if hasattr(made, "contract") else None


def load_reference(reference: str, kind: str = "environment") -> Any:
    """Import `pkg.mod:Name` or `./file.py:Name`. A file with a single class of that kind needs no `:Name`."""
    where, _, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    if where.endswith(".py") and not Path(where).is_file():
        raise ConfigError(f"there is no file {Path(where).resolve()}.", remedy=WHERE)
    try:
        with contained(f"importing {where}"):
            module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except EndsProcess as error:
        raise PluginError(f"{reference!r} could not be imported: {error}") from error
    except ModuleNotFoundError as error:
        if error.name and where.split(".")[0] == error.name.split(".")[0]:
            raise ConfigError(
                f"{reference!r}: no module named {error.name!r}. A file is named ./file.py:Class."
            ) from error
        raise PluginError(f"{reference!r} could not be imported: {error}") from error
    except ConfigError:
        raise
    except Exception as error:
        raise PluginError(f"{reference!r} could not be imported: {type(error).__name__}: {error}") from error
    if where.endswith(".py"):
        _refuse_modules_of_another_file(module)
    if not name:
        found = [
            value for value in vars(module).values() if _is_of(kind, value) and value.__module__ == module.__name__
        ]
        if len(found) != 1:
            raise _which(reference, kind, [one.__name__ for one in found], module)
        return found[0]
    try:
        return getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, [key for key in vars(module) if not key.startswith("_")], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{reference!r}: there is no {name!r} in it.{hint}") from None


def _which(reference: str, kind: str, found: Sequence[str], module: Any) -> ConfigError:
    """Return the error for a file that does not have exactly one component of a kind."""
    several = f"{kind}s" if kind != "curriculum" else "curricula"
    if found:
        return ConfigError(
            f"{reference!r} has {len(found)} {several}: say which, as {reference}:{found[0]}. It has {', '.join(found)}."
        )
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    functions = [name for name in own if inspect.isroutine(vars(module)[name])]
    if kind in CALLED and functions:
        return ConfigError(
            f"{reference!r}: say which {kind} of it, as {reference}:{functions[0]}. It has {', '.join(functions)}."
        )
    return ConfigError(
        f"{reference!r} has no class that is one of {several}" + (f"; it has {', '.join(own)}." if own else "."),
        remedy=f"Derive it from atropos_core.{_interface(kind).__name__}, or name another kind; `atropos new {kind} NAME` writes one.",
    )


def _provider(kind: str, made: Any, name: str, options: type[BaseModel] | None, build: Any) -> Provider[Any]:
    said = _said(kind, made, name) if kind in MOVES_WEIGHTS or inspect.isclass(made) else {}
    cls = made if inspect.isclass(made) or inspect.isroutine(made) else type(made)
    summary = next(iter((cls.__doc__ or "your own").strip().splitlines()))
    return PROVIDERS.get(kind, Provider)(name, summary, options, build, **said)


def _said(kind: str, made: Any, name: str) -> Mapping[str, Any]:
    """Return the class attributes that have the name of a field of the kind's Provider."""
    from atropos_core.interfaces import Transport

    fields = {field.name for field in dataclasses.fields(PROVIDERS.get(kind, Provider))}
    said: dict[str, Any] = {
        name: getattr(made, name)
        for name in ("runs_in", "several_devices", "several_machines")
        if name in fields and hasattr(made, name)
    }
    if hasattr(made, "requires"):
        said["requires"] = frozenset(made.requires)
    if said.get("runs_in", "here") not in ("here", "process"):
        raise ConfigError(f"{name!r}: runs_in is 'here' or 'process', not {said['runs_in']!r}.")
    if said.get("runs_in") == "process" and kind not in HOSTED:
        raise ConfigError(
            f'{name!r}: runs_in = "process" is of engines, trainers and rewards; a {kind} lives in the run\'s own process.',
            remedy="Remove the attribute. Heavy work can run in your own process or thread pool.",
        )
    if kind not in MOVES_WEIGHTS:
        return said
    given = getattr(made, "transports", None)
    if isinstance(given, str) or not isinstance(given, set | frozenset | tuple | list):
        raise ConfigError(
            f"{name!r} does not say how weights travel to or from it.",
            remedy=f'Give it the attribute transports = {{"in_process"}}, of {", ".join(get_args(Transport))}: '
            "engine, trainer and bridge have to share one.",
        )
    if wrong := sorted(set(given) - set(get_args(Transport))):
        raise ConfigError(
            f"{name!r}: there is no transport {wrong[0]!r}. Choose one of: {', '.join(get_args(Transport))}."
        )
    carried = frozenset(given)
    return {**said, "transports": lambda options: carried}


def _interface(kind: str) -> type:
    from atropos_core import interfaces

    found: type = getattr(interfaces, kind.capitalize())
    return found


def _is_protocol(interface: type) -> bool:
    return bool(getattr(interface, "_is_protocol", False))


def _is_of(kind: str, value: Any) -> bool:
    return inspect.isclass(value) and _interface(kind) in value.__mro__[1:]


def _missing(kind: str, cls: type) -> Iterator[str]:
    """Yield the methods of the interface that `cls` lacks."""
    interface = _interface(kind)
    if not _is_protocol(interface):
        yield from sorted(getattr(cls, "__abstractmethods__", ()))
        return
    for name, method in vars(interface).items():
        if inspect.isfunction(method) and name not in ("__init__", "__subclasshook__"):
            has = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
            if has is None or has is method:
                yield name
    yield from (name for name in vars(interface).get("__annotations__", ()) if not hasattr(cls, name))


def _check_class(kind: str, cls: type, name: str, made: Any = None) -> None:
    """Raises ConfigError that names the class to derive from, or the missing methods."""
    interface = _interface(kind)
    shown = cls if made is None else made
    missing = list(_missing(kind, cls))
    if kind == "loss" and missing:
        raise ConfigError(
            f"{name!r} is not a loss, but {shown!r}.",
            remedy="A function becomes one by the trainer's decorator; `atropos new loss NAME` writes one.",
        )
    other = kind_of(cls)
    if _is_protocol(interface):
        if missing and (other not in (None, kind) or len(missing) == len(list(_missing(kind, object)))):
            raise ConfigError(
                f"{name!r} is not a {kind}, but {shown!r}.",
                remedy=f"A {kind} is a class with {_and(missing)}: atropos_core.interfaces.{interface.__name__}.",
            )
    elif interface not in cls.__mro__:
        raise ConfigError(
            f"{name!r} is not a class derived from atropos_core.{interface.__name__}, but {shown!r}."
            + (f" That is for a section of kind {other!r}." if other not in (None, kind) else ""),
            remedy=f"Derive it: `class Name(atropos_core.{interface.__name__})`. `atropos new {kind} NAME` writes one that works.",
        )
    if kind == "environment":
        from atropos_core.plugins.environment_methods import check_methods

        check_methods(cls, name, made)
    if missing:
        raise ConfigError(
            f"{name!r} lacks {_and(missing)}, which every {kind} has.",
            remedy=f"atropos_core.interfaces.{interface.__name__} says what {'they do' if len(missing) > 1 else 'it does'}.",
        )


def _and(names: list[str]) -> str:
    shown = [f"{name}()" for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _load_file(path: Path) -> Any:
    path = path.resolve()
    for module in list(sys.modules.values()):  # the copy that this process has may be in use, and was perhaps set up
        file = str(getattr(module, "__file__", None))
        if os.path.basename(file) == path.name and Path(file).resolve() == path and module.__name__ != "__main__":
            return module
    if (member := _name_in_package(path)) is not None:
        return importlib.import_module(member)
    name = f"{_FILE}{path.stem}_{abs(hash(str(path))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _find_in(path.parent)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last: no file of a user's stands in for an installed module


def _name_in_package(path: Path) -> str | None:
    """Return the dotted name of a file that imports from its own package, relatively or by the package's name, and put the
    package's folder on sys.path. None for any other file, and if an installed package has that name: then the file is loaded
    without its package. Raises ConfigError if another folder has that name."""
    depth = min(max(_levels(path), default=0), len(path.parents) - 1)
    if not depth:
        return None
    while (path.parents[depth] / "__init__.py").is_file():
        depth += 1
    root = path.parents[depth]
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    _find_in(root)
    top, *_ = name.split(".")
    spec = importlib.util.find_spec(top)
    first = next(iter((spec.submodule_search_locations if spec else None) or [(spec.origin if spec else None) or ""]))
    if Path(first).resolve() == root / top:
        return name
    if not os.path.isabs(first) or _is_installed(first):
        return None
    raise ConfigError(
        f"{path} imports from its package {top!r}, and {first} is found first by that name.",
        remedy=f"Rename the folder {root / top}.",
    )


def _levels(path: Path) -> Iterator[int]:
    """Yield, for each import from a folder that contains the file, how many folders up that is, from 1."""
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.level
        elif isinstance(node, ast.Import | ast.ImportFrom):
            begin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for parts in ((begin + one.name).split(".") for one in node.names):
                for level, folder in enumerate(path.parents, 1):
                    if folder.name == parts[0] and _has(folder, parts[1:]):
                        yield level


def _has(folder: Path, parts: Sequence[str]) -> bool:
    """Return True if a package in that folder has what is imported from it: a module, or a name of the package or a module."""
    if (folder / "__init__.py").is_file():
        return True
    return bool(parts) and ((folder / parts[0]).is_dir() or (folder / f"{parts[0]}.py").is_file())


def _refuse_modules_of_another_file(module: Any) -> None:
    """Raises ConfigError if a module of the same name was already imported from another folder: Python would reuse it."""
    here = Path(module.__file__).parent
    others = {Path(str(one.__file__)).parent for name, one in sys.modules.items() if name.startswith(_FILE)} - {here}
    for value in vars(module).values():
        used = value if inspect.ismodule(value) else sys.modules.get(str(getattr(value, "__module__", None)))
        place = Path(getattr(used, "__file__", None) or "")
        if used is not module and place.parent in others and (here / place.name).is_file():
            raise ConfigError(
                f"{module.__file__} got {place.name} from {place.parent}, which another component imported first, but it has its "
                "own file of that name.",
                remedy="Rename one of the two.",
            )
