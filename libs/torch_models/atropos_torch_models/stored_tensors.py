"""The tensors of a model as files of weights have them, and back: a file often has a tensor for each expert of a layer, which the
model computes with as one tensor.

transformers converts names and shapes when it loads and when it saves. Code that reads or writes tensors itself uses the same rules
through this module: files, bridges and servers such as vLLM then agree on every name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from atropos_torch_models.tensors import tensors_of

_LAYER = re.compile(r".*?\.\d+\.")  # up to the number of a layer, in which all tensors of one conversion are


@dataclass
class Conversion:
    """Tensors of files, and the tensors of the model that they become: mostly one and the same."""

    target: str  # the first of the model's tensors
    model: Any
    converter: WeightConverter | None
    sources: list[tuple[str, str]] = field(default_factory=list)  # the converter's pattern, and the name in the files

    def tensors(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the model's tensors by name. `read` returns a tensor of the files. Raises ValueError or RuntimeError for
        tensors that do not belong together."""
        if self.converter is None:
            ((_, name),) = self.sources
            return {self.target: read(name)}
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, read(name))  # type: ignore[arg-type] # as transformers' own saving does
        made: Any = converter.convert(self.target, model=self.model, config=self.model.config)
        made = (
            made[0] if isinstance(made, tuple) else made
        )  # transformers 5.0 adds its errors, after which tensors are missing
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def conversions(model: Any, names: Iterable[str]) -> list[Conversion]:
    """Return what each of `names`, which are those of tensors in files, belongs to. A name that the model does not know becomes a
    tensor of that name."""
    present = model.state_dict(keep_vars=True)
    known = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
    renamings = [one for one in known if isinstance(one, WeightRenaming)]
    converters = [one for one in known if isinstance(one, WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, Conversion] = {}
    prefix = getattr(model, "base_model_prefix", None)
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, present)
        if target not in present and name in present:
            target, pattern = name, None
        converter = None if pattern is None else of_pattern[pattern]
        if target in found and converter is None:
            target = name  # a second file tensor for one of the model's: not the model's
        made = found.setdefault(target, Conversion(target, model, converter))
        made.sources.append((pattern or name, name))
    return list(found.values())


def converted_shapes(
    model: Any, described: Mapping[str, tuple[torch.dtype, Iterable[int]]]
) -> Iterator[tuple[Conversion, dict[str, Tensor]]]:
    """Yield each conversion of tensors with these dtypes and shapes, and the model's tensors that it makes, on the meta device."""

    def shape(name: str) -> Tensor:
        dtype, sizes = described[name]
        return torch.empty(tuple(sizes), dtype=dtype, device="meta")

    for one in conversions(model, described):
        yield one, one.tensors(shape)


def stored_tensors(model: Any, *, shapes: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `save_pretrained` would write, by the names that it would give them, tied ones once. Those that it
    converts are copies, made layer by layer. With `shapes` all are on the meta device, and nothing is copied."""
    present = {name: one.to("meta") if shapes else one for name, one in tensors_of(model).items()}
    if not isinstance(model, PreTrainedModel):
        yield from present.items()
        return
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in present.items():
        found = _LAYER.match(name)
        layers.setdefault(found[0] if found else name, {})[name] = tensor
    for tensors in layers.values():
        yield from revert_weight_conversion(model, tensors).items()
