"""Read an atroposlib file without running it: its class, its configuration, the bodies of its methods."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atropos_core.errors import ConfigError

BASES = ("BaseEnv", "TeacherDistillationEnv", "BaseLanguageEnv")
CONFIGS = ("BaseEnvConfig", "TeacherDistillationConfig")
PLAIN = frozenset(
    {"int", "float", "bool", "str", "list", "dict", "tuple", "Any", "None", "Literal", "Optional", "List", "Dict"}
)
MODERN = {"List": "list", "Dict": "dict"}
BARE = {"list": "list[Any]", "dict": "dict[str, Any]", "tuple": "tuple[Any, ...]"}  # as mypy --strict wants them
OF_THE_RUN = {  # fields of atroposlib's configuration, and what sets them in a run file
    "group_size": "training.group_size",
    "max_token_length": "sampling.max_tokens (of a reply; theirs is of the whole sequence)",
    "batch_size": "training.groups_per_step (in groups; theirs in sequences)",
    "total_steps": "training.steps",
    "steps_per_eval": "evaluation.every",
    "inference_weight": "environment.NAME.weight",
    "max_batches_offpolicy": "training.max_staleness",
}


@dataclass(frozen=True)
class ConfigField:
    name: str
    annotation: str
    default: Any
    description: str


@dataclass
class Read:
    file: Path
    name: str  # of the class
    fields: list[ConfigField] = field(default_factory=list)
    methods: dict[str, str] = field(default_factory=dict)  # source by name, without the class's indent
    left: list[str] = field(default_factory=list)  # what was not carried over, and its new place


def read(file: Path, wanted: str) -> Read:
    """Read the file's one environment, or the class `wanted`. Raises ConfigError if the file has none, or is not Python."""
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise ConfigError(f"{file} cannot be read as Python: {error}") from error
    classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
    environments = {name: one for name, one in classes.items() if _derives(one, classes, BASES)}
    if wanted and wanted not in environments:
        raise ConfigError(f"{file} has no environment {wanted!r}, a class derived from BaseEnv.")
    leaves = [name for name in environments if not any(name in _bases(one) for one in environments.values())]
    if not wanted and len(leaves) != 1:
        names = ", ".join(leaves) or "none"
        raise ConfigError(
            f"{file} has {len(leaves)} environments ({names}), but one is imported.", remedy=f"Say which: {file}:Class"
        )
    cls = environments[wanted or leaves[0]]
    made = Read(file, cls.name)
    for one in reversed([cls, *_own_bases(cls, classes)]):
        for node in one.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                made.methods[node.name] = textwrap.dedent(_source(text, node))
            elif not isinstance(node, ast.Expr | ast.Pass) and not _names_itself(node):
                made.left.append(f"{one.name}, line {node.lineno}: {_short(ast.unparse(node))}")
    _read_config(made, text, cls, classes)
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            if not ast.unparse(statement).removeprefix("from ").removeprefix("import ").startswith("atroposlib"):
                made.left.append(f"line {statement.lineno}: {ast.unparse(statement)}")
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if statement.name != cls.name and not (
                isinstance(statement, ast.ClassDef) and _derives(statement, classes, (*BASES, *CONFIGS))
            ):
                made.left.append(f"line {statement.lineno}: {statement.name}")
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            made.left.append(f"line {statement.lineno}: {_short(ast.unparse(statement))}")
    return made


def _read_config(made: Read, text: str, cls: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> None:
    """Read the fields of the file's configuration classes, with the values that config_init gives them."""
    init = next((one for one in cls.body if isinstance(one, ast.FunctionDef) and one.name == "config_init"), None)
    calls = [one for one in ast.walk(init) if isinstance(one, ast.Call)] if init is not None else []
    configs = {name: one for name, one in classes.items() if _derives(one, classes, CONFIGS)}
    named = [one.value.id for one in cls.body if isinstance(one, ast.Assign) and isinstance(one.value, ast.Name)]
    of = next(
        (one.func.id for one in calls if isinstance(one.func, ast.Name) and one.func.id in {*configs, *CONFIGS}), ""
    )
    of = of or next((name for name in named if name in configs), "")
    given = {
        one.arg: one.value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == of
        for one in call.keywords
        if one.arg is not None
    }
    if of in configs:
        for config in reversed([configs[of], *_own_bases(configs[of], configs)]):
            for node in config.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    _read_field(made, node, given.pop(node.target.id, None))
                elif not isinstance(node, ast.Expr | ast.Pass):
                    made.left.append(f"{config.name}, line {node.lineno}: {_short(ast.unparse(node))}")
    for name, value in given.items():
        where = OF_THE_RUN.get(name, "has no effect here")
        made.left.append(f"config_init, {name} = {_short(ast.unparse(value))}: {where}")


def _read_field(made: Read, node: ast.AnnAssign, given: ast.expr | None) -> None:
    assert isinstance(node.target, ast.Name)
    name, value, description = node.target.id, node.value, ""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("Field"):
        keywords = {one.arg: one.value for one in value.keywords}
        said = keywords.get("description")
        description = str(ast.literal_eval(said)) if isinstance(said, ast.Constant) else ""
        value = keywords.get("default", value.args[0] if value.args else None)
    value = given or value
    names = {one.id for one in ast.walk(node.annotation) if isinstance(one, ast.Name)}
    if value is None or not _is_literal(value) or names - PLAIN:
        made.left.append(f"option {name}, line {node.lineno}: {_short(ast.unparse(node))}")
        return
    for inner in ast.walk(node.annotation):
        if isinstance(inner, ast.Name):
            inner.id = MODERN.get(inner.id, inner.id)
    default = ast.literal_eval(value)
    made.fields.append(ConfigField(name, _annotation(node.annotation, default), default, description))


class _Optional(ast.NodeTransformer):
    """Writes `Optional[x]` as `x | None`."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "Optional":
            return ast.BinOp(node.slice, ast.BitOr(), ast.Constant(None))
        return node


def _annotation(node: ast.expr, default: object) -> str:
    text = ast.unparse(_Optional().visit(node)).replace("'", '"')
    text = re.sub(r"\b(list|dict|tuple)\b(?!\[)", lambda found: BARE[found[1]], text)
    if default is None and not re.search(r"\b(None|Any)$", text):
        text = f"{text} | None"  # as in `path: str = None`
    return text


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _bases(cls: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).rpartition(".")[2] for base in cls.bases]


def _own_bases(cls: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """The base classes that are in the file, nearest first."""
    near = [classes[name] for name in _bases(cls) if name in classes and name != cls.name]
    return [*near, *(one for base in near for one in _own_bases(base, classes))]


def _derives(cls: ast.ClassDef, classes: dict[str, ast.ClassDef], roots: tuple[str, ...]) -> bool:
    return any(name in roots for one in (cls, *_own_bases(cls, classes)) for name in _bases(one))


def _source(text: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _names_itself(node: ast.stmt) -> bool:
    """True for its name and its configuration's class, which the skeleton has."""
    target = (
        node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    )
    return isinstance(target, ast.Name) and target.id in ("name", "env_config_cls")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77]}..."
