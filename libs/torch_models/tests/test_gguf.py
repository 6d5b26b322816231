from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atropos_core.errors import ConfigError
from atropos_core.plugins.manager import load_plugins
from atropos_torch_models.gguf_cache import find_file, model_directory
from atropos_torch_models.gguf_conversion import LLAMA3, checked_header, convert, llama3_divisors
from tests.gguf_files import TEMPLATE, write_gguf

pytest.importorskip("gguf", reason="the extra atropos-torch-models[gguf] is not installed")

TEXTS = ("Tom has 12 apples, and buys 345 more.\n\n  How many?", "#### 357", "<|user|>Don't say 1<|end|><|assistant|>")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "Q8_0")
    return path


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "bfloat16"), ("BF16", "bfloat16"), ("Q4_1", "bfloat16"), ("Q8_0", "bfloat16")]
)  # fmt: skip
def test_a_model_directory_has_exactly_the_dequantized_numbers(tmp_path: Path, kind: str, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    reference = write_gguf(tmp_path / "tiny.gguf", kind)
    made = tmp_path / "made"
    made.mkdir()
    assert convert(tmp_path / "tiny.gguf", made) == {"from": kind, "to": "float32", "warning": ""}
    tensors = load_file(made / "model.safetensors")
    assert set(tensors) == set(reference)
    for name, tensor in tensors.items():
        assert np.array_equal(tensor.numpy(), reference[name]), name
    assert json.loads((made / "config.json").read_text())["dtype"] == dtype
    ids = torch.arange(2, 42)[None]
    ours = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32, head_dim=32)
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    if kind == "F32":
        tiny = AutoModelForCausalLM.from_pretrained(load_plugins().resolve_model("tiny").directory, dtype=torch.float32)
        assert torch.equal(ours(ids).logits, tiny(ids).logits)


def test_the_tokenizer_and_the_template_are_those_of_the_file(tmp_path: Path, file: Path) -> None:
    from transformers import AutoTokenizer

    from atropos_core.rollouts.tokenizer import ChatTokenizer

    made = tmp_path / "made"
    made.mkdir()
    convert(file, made)
    ours, theirs = AutoTokenizer.from_pretrained(made), AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.chat_template == TEMPLATE
    assert ours.eos_token == "<|end|>"
    assert (len(theirs), len(ours)) == (599, 598), "transformers adds <|endoftext|>, for which there is no embedding"
    assert "<|endoftext|>" not in (made / "tokenizer_config.json").read_text()
    chat = ChatTokenizer(made)
    assert chat.has_end
    assert list(chat.encode(TEXTS[2])) == theirs.encode(TEXTS[2])


def test_digits_are_split_off_as_the_file_declares(tmp_path: Path) -> None:
    """llama.cpp splits by \\p{N} first, then as GPT-2 does; transformers, which loads it as GPT-2's, takes a space to the number."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    write_gguf(tmp_path / "smollm.gguf", tokenizer__ggml__pre="smollm")
    made = tmp_path / "made"
    made.mkdir()
    assert convert(tmp_path / "smollm.gguf", made)["warning"] == ""
    ours, reference = (Tokenizer.from_file(str(made / "tokenizer.json")) for _ in range(2))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in (*TEXTS, "a  40 percent", "１２ ½ x1\t2"):
        assert ours.pre_tokenizer.pre_tokenize_str(text) == reference.pre_tokenizer.pre_tokenize_str(text)
        assert ours.encode(text).ids == reference.encode(text).ids
    assert [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str("a  40")] == ["a", "ĠĠ", "4", "0"]


def test_a_way_to_split_that_transformers_does_not_know_is_said(tmp_path: Path) -> None:
    write_gguf(tmp_path / "own.gguf", tokenizer__ggml__pre="of-tomorrow")
    assert "splits text as 'of-tomorrow'" in convert(tmp_path / "own.gguf", tmp_path)["warning"]


def test_the_stretched_positions_of_llama_3_are_found_again(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    norms = tuple(f"blk.{layer}.attn_{part}_norm.weight" for layer in range(4) for part in "qk")
    for factor in (8.0, 32.0):
        rope = {**LLAMA3, "factor": factor}
        divisors = llama3_divisors(500_000.0, 32, rope)
        assert divisors[0] == 1 and divisors[-1] == factor and any(1 < one < factor for one in divisors)
        llama = {"general__architecture": "llama", "llama__rope__freq_base": 500_000.0, "without": norms}
        write_gguf(tmp_path / "llama.gguf", more={"rope_freqs.weight": divisors}, **llama)
        convert(tmp_path / "llama.gguf", tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        plain = 500_000.0 ** -(np.arange(0, 32, 2) / 32)
        assert torch.allclose(model.model.rotary_emb.inv_freq.double(), torch.tensor(plain / divisors), rtol=1e-6)
        (tmp_path / "config.json").unlink()
    write_gguf(tmp_path / "llama.gguf", more={"rope_freqs.weight": divisors * 1.01}, **llama)
    with pytest.raises(ConfigError, match="of no published Llama 3"):
        convert(tmp_path / "llama.gguf", tmp_path)


def _cut(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def _put(offset: int, form: str, value: int) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(struct.pack(form, value))

    return put


def _put_type(path: Path) -> None:
    content = path.read_bytes()
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    path.write_bytes(content[:at] + struct.pack("<I", 999) + content[at + 4 :])


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "starts with b'vers', not with b'GGUF'"),
        (lambda path: path.write_bytes(b""), "starts with b''"),
        (_put(4, "<I", 1), "of version 1, and only versions 2 and 3"),
        (_put(4, ">I", 3), "for machines of the other byte order"),
        (_put(16, "<Q", 1 << 60), "entries at byte .*: it is cut off or damaged"),
        (_put(8, "<Q", 1 << 60), "entries at byte .*: it is cut off or damaged"),
        (_cut(0.002), "entries at byte .*: it is cut off or damaged"),
        (_cut(0.7), r"is cut off: its tensors need [\d,]+ bytes more"),
        (_put_type, "has tensors of type 999, which gguf [0-9.]+ does not know"),
        (lambda path: write_gguf(path, without=("tensors",)), "has a vocabulary and no weights"),
        (lambda path: write_gguf(path, without=("tokenizer.ggml.model",)), "has no tokenizer"),
        (lambda path: write_gguf(path, general__type="adapter"), "is not a model: its general.type is 'adapter'"),
        (lambda path: write_gguf(path, split__count=3), "is one of 3 parts of a model"),
    ],
    ids=["not gguf", "empty", "version", "byte order", "pairs", "tensors", "header cut", "tensors cut", "type", "vocabulary", "tokenizer",
         "adapter", "split"],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_clear_error(file: Path, harm: Callable[[Path], object], told: str) -> None:
    harm(file)
    with pytest.raises(ConfigError, match=told) as raised:
        checked_header(file)
    assert str(file) in str(raised.value) and raised.value.remedy


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"general__architecture": "nonsense"},
            "transformers [0-9.]+ does not load .*, of the architecture 'nonsense'",
        ),
        ({"qwen3__attention__key_length": 16}, "has model.layers.0.self_attn.k_norm.weight in the shape"),
        (
            {"without": ("blk.1.ffn_up.weight",)},
            "lacks 1 tensors of its model, model.layers.1.mlp.up_proj.weight among them",
        ),
        ({"tokenizer__ggml__model": "rwkv"}, "does not load the tokenizer of .* .'rwkv'"),
    ],
    ids=["architecture", "shapes", "a missing tensor", "tokenizer"],
)
def test_a_file_that_transformers_does_not_load_is_one_clear_error(
    tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=told):
        convert(path, tmp_path)


def test_numbers_that_the_model_would_not_take_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "fewer.gguf", qwen3__block_count=3)
    with pytest.raises(ConfigError, match="so that some would be lost"):
        convert(tmp_path / "fewer.gguf", tmp_path)


def test_without_the_package_gguf_the_error_names_the_extra(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(ConfigError, match=r"pip install 'atropos-torch-models\[gguf\]'"):
        checked_header(file)


def test_a_disk_without_room_is_refused_before_the_weights_are_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="needs 0.0 GB as a model directory"):
        convert(file, file.parent)


def test_a_directory_names_its_only_gguf_file(tmp_path: Path, file: Path) -> None:
    assert find_file(str(tmp_path)) == file
    assert find_file(str(file)) == file
    assert find_file("tiny") is None and find_file("owner/model") is None
    shutil.copy(file, tmp_path / "other.GGUF")
    with pytest.raises(ConfigError, match=r"has 2 GGUF files \(other.GGUF, tiny.gguf\)"):
        find_file(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert find_file(str(tmp_path)) is None, "a model directory with GGUF files next to it"
    with pytest.raises(ConfigError, match="none.gguf does not exist"):
        load_plugins().resolve_model(str(tmp_path / "none.gguf"))
    nameless = tmp_path / "sha256-0123"
    shutil.copy(file, nameless)
    assert find_file(str(nameless)) == nameless, "found by how it begins"


RESOLVE = """
import sys
from pathlib import Path
from atropos_torch_models.gguf_cache import model_directory
assert "torch" not in sys.modules
print(model_directory(Path(sys.argv[1]))[0])
assert "torch" not in sys.modules
"""


def _start(file: Path, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RESOLVE, str(file)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _resolved(file: Path, cache: Path) -> tuple[Path, str]:
    process = _start(file, cache)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return Path(out.strip()), err


def test_two_processes_convert_a_file_once_and_a_damaged_directory_is_made_again(tmp_path: Path, file: Path) -> None:
    cache = tmp_path / "cache"
    both = [_start(file, cache) for _ in range(2)]
    [one, other] = [process.communicate(timeout=200) for process in both]
    assert one[0] == other[0] != "", one[1] + other[1]
    said = "\n".join([one[1], other[1]])
    assert said.count(f"model: {file.name}, dequantized from Q8_0 to float32 in {cache}") == 2
    directory = Path(one[0].strip())
    assert [path for path in directory.parent.iterdir() if path.is_dir()] == [directory]
    made = directory.stat().st_ino

    weights = directory / "model.safetensors"
    os.utime(weights, (1, 1))  # as a copy has it
    again, said = _resolved(file, cache)
    assert (again.stat().st_ino, "making it again" in said) == (made, False)
    with weights.open("r+b") as changed:
        changed.seek(-1, os.SEEK_END)
        last = changed.read(1)
        changed.seek(-1, os.SEEK_END)
        changed.write(bytes([last[0] ^ 1]))
    again, said = _resolved(file, cache)
    assert f"is damaged ({weights} has changed): making it again" in " ".join(said.split())
    assert again == directory and weights.read_bytes()[-1:] == last

    write_gguf(file, "Q8_0", general__name="another")
    another, _ = _resolved(file, cache)
    assert another != directory, "another content under the same name"


def test_a_killed_conversion_leaves_no_model_directory_and_no_process(tmp_path: Path, file: Path) -> None:
    cache = tmp_path / "cache"
    process = _start(file, cache)
    kept = cache / "atropos" / "gguf"
    deadline = time.monotonic() + 100
    while not (found := list(kept.glob(".*.partial/tokenizer.json"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)
    assert not list(kept.glob("[!.]*")), "nothing that could be taken for a model"
    assert children and found
    while any(os.path.exists(f"/proc/{child}") for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    directory, _ = _resolved(file, cache)
    assert (directory / "model.safetensors").is_file()
    assert not list(kept.glob(".*.partial"))


def test_a_cache_that_cannot_be_written_is_named(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(Exception, match="cannot be kept in .*taken") as raised:
        model_directory(file)
    assert "XDG_CACHE_HOME" in str(raised.value)
