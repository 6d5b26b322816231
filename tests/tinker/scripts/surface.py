"""What a server of the client sees: its calls, the fields of its types and messages, and its paths, as JSON: surface.py OUT."""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import tinker

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")
PATH = re.compile(r'"(/api/v1/[^"]+)"')

found = {"version": tinker.__version__}
for name in CLIENTS:
    for method, function in inspect.getmembers(getattr(tinker, name), callable):
        if not method.startswith("_"):
            found[f"{name}.{method}"] = str(inspect.signature(function))
for name, kind in inspect.getmembers(tinker.types, inspect.isclass):
    fields = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", {})
    for field, value in fields.items():
        found[f"types.{name}.{field}"] = str(getattr(value, "annotation", None) or getattr(value, "type", ""))
package = Path(tinker.__file__).parent
for path in sorted((package / "proto").glob("*_pb2.py")):
    module = importlib.import_module(f"tinker.proto.{path.stem}")
    for message, descriptor in module.DESCRIPTOR.message_types_by_name.items():
        for field in descriptor.fields:
            found[f"message {message}.{field.name}"] = f"{field.number}, type {field.type}"
for path in sorted(package.rglob("*.py")):
    if not path.stem.endswith("_test"):
        found |= {f"path {one}": "" for one in PATH.findall(path.read_text())}
Path(sys.argv[1]).write_text(json.dumps(found))
