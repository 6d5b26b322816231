"""The memory that the trainer plans, compared with the memory that torch then holds."""

import pytest
import torch

from atropos_core.launch.memory_plan import peak
from atropos_core.models.model_size import read
from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_trainer_grpo import lora as adapters
from atropos_trainer_grpo.config import GrpoOptions, LoraOptions
from atropos_trainer_grpo.memory import adapter_parameters, layer_bytes, rows_of
from atropos_trainer_grpo.model import open_model, score
from atropos_trainer_grpo.packed_rows import pack
from atropos_trainer_grpo.plugin import holds
from atropos_trainer_grpo.sizes import SEQUENCES, sizes


def workload(directory, groups=3, size=4, prompt=8, reply=16, transport="checkpoint"):
    return Workload(RunContext(directory, directory, transport=transport), groups, size, reply, 0, prompt)


def planned(options, work):
    return {one.what: one.size_bytes for one in holds(GrpoOptions(**options), work)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_activations_are_what_autograd_keeps(model_of, make_batch, kind, dtype, adapted):
    directory = model_of(kind, dtype=dtype)
    model = open_model(directory, dtype=str(dtype).removeprefix("torch."), device="cpu", with_weights=True)
    layers = model.base_model.layers
    if adapted:
        model = adapters.attach(model, LoraOptions(rank=1), directory)
    groups, size, prompt, reply = 3, 4, 8, 16
    tokens = torch.randint(2, 30, (groups, 1, prompt)).expand(groups, size, prompt)
    tokens = torch.cat([tokens, torch.randint(2, 30, (groups, size, reply))], dim=2)
    tokens[:, :, prompt] = torch.arange(size) + 2  # replies differ at once
    lengths = torch.full((groups * size,), prompt + reply).numpy()
    packing = pack(tokens.flatten().int().numpy(), lengths, share=True)

    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows = torch.arange(4)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        whole = score(model, packing, rows, rows, torch.ones(4), 4)
    assert whole.logprobs.requires_grad
    kept = sum(found.values())

    shape = read(directory)
    made = rows_of(GrpoOptions(), workload(directory), shape)
    assert made.packed == packing.tokens.numel()
    assert made.keys == len(packing.keys)
    element = dtype.itemsize
    norm = made.packed * shape.hidden * 3 * element
    expected = len(layers) * layer_bytes(shape, made, element, adapted) + norm
    assert kept == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("options", [{}, {"layers": [1], "targets": ["q_proj", "down_proj"]}])
def test_the_adapter_has_as_many_parameters_as_peft_makes(model_of, options):
    directory, lora = model_of(), LoraOptions(rank=3, **options)
    model = adapters.attach(open_model(directory, dtype="float32", device="cpu", with_weights=True), lora, directory)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert adapter_parameters(read(directory), lora) == trained


def test_weights_masters_and_moments_are_counted_by_what_is_trained(model_of):
    directory = model_of(dtype=torch.bfloat16)
    number, work = read(directory).parameters, workload(directory)
    fp32, bf16 = planned({}, work), planned({"dtype": "bfloat16", "kl": {}}, work)
    assert fp32["parameters"] == 4 * number
    assert fp32["optimiser moments"] == 8 * number
    assert "fp32 masters" not in fp32
    assert (bf16["parameters"], bf16["fp32 masters"], bf16["optimiser moments"]) == (2 * number, 4 * number, 8 * number)
    assert bf16["reference model"] == 2 * number
    lora = planned({"dtype": "bfloat16", "kl": {}, "lora": {"rank": 2}}, work)
    adapter = adapter_parameters(read(directory), LoraOptions(rank=2))
    assert (lora["adapter"], lora["optimiser moments"]) == (4 * adapter, 8 * adapter)
    assert "reference model" not in lora, "the base is the reference"
    assert "fp32 masters" not in lora, "adapters are in fp32 as they are"


def ranked(directory, ranks, devices=None, machine=0, machines=1, **options):
    """Totals by device, and of each use by name."""
    devices = devices or ("cpu",) * ranks
    context = RunContext(
        directory, directory, transport="checkpoint", devices=devices, machine=machine, machines=machines
    )
    parts = list(holds(GrpoOptions(**options), Workload(context, 3, 4, 16, 0, 8)))
    totals = {}
    for one in parts:
        totals[one.what] = totals.get(one.what, 0) + one.size_bytes
    return totals, parts


def test_ranks_divide_what_is_trained_and_each_is_a_process_that_reads_the_whole_model(model_of):
    directory = model_of(dtype=torch.bfloat16)
    number = read(directory).parameters
    alone, _ = ranked(directory, 1)
    assert "whole model of rank 0" not in alone
    totals, parts = ranked(directory, 4)
    assert totals["interpreter and libraries"] == 4 * alone["interpreter and libraries"]
    assert totals["whole model of rank 0"] == 4 * number
    assert totals["parameters"] == pytest.approx(4 * number, abs=16)
    assert totals["optimiser moments"] == pytest.approx(8 * number, abs=64)
    assert not [one for one in parts if one.phase == "saving"], "each rank writes its own part of a checkpoint"
    opening = [one.size_bytes for one in parts if one.phase == "opening"]
    there = totals["parameters"] + totals["optimiser moments"]
    assert opening == [pytest.approx(4 * 4 * number - there, abs=64)], "with those that come in their place"

    totals, parts = ranked(directory, 4, devices=tuple(f"cuda:{i}" for i in range(4)), kl={})
    assert totals["parameters"] == pytest.approx(4 * number, abs=16), "fp32 shards are the masters"
    assert "fp32 masters" not in totals
    assert totals["reference model"] == pytest.approx(2 * number, abs=16)
    in_host = {one.what: one.size_bytes for one in parts if one.device == "cpu"}
    assert in_host["whole model of rank 0"] == 2 * number
    assert in_host["models before they are divided"] == 4 * (4 + 2) * number


def test_ranks_of_several_machines_divide_one_model_and_a_machine_plans_its_own(model_of):
    directory = model_of(dtype=torch.bfloat16)
    here, _ = ranked(directory, 4)
    first, _ = ranked(directory, 2, machines=2)
    second, _ = ranked(directory, 2, machines=2, machine=1)
    for what in ("parameters", "optimiser moments", "interpreter and libraries"):
        assert first[what] == second[what] == pytest.approx(here[what] / 2, abs=64), what
    assert first["whole model of rank 0"] == here["whole model of rank 0"]
    assert "whole model of rank 0" not in second


@pytest.mark.parametrize("transports", [("copy",), ("posix_shm", "copy")])
def test_the_copy_that_engines_load_is_a_model_more_in_host_memory(model_of, transports):
    directory = model_of()
    context = RunContext(directory, directory, transport=transports[0], transports=transports, devices=("cuda:0",))
    parts = {one.what: one for one in holds(GrpoOptions(dtype="bfloat16"), Workload(context, 3, 4, 16, 0, 8))}
    copy = parts["copy that engines load"]
    assert (copy.size_bytes, copy.device, copy.shared) == (2 * read(directory).parameters, "cpu", "")
    assert "copy that engines load" not in planned({}, workload(directory, transport="posix_shm"))


def test_what_bounds_memory_bounds_the_plan(model_of):
    directory = model_of()
    work = workload(directory, groups=64, reply=100)

    def total(**options):
        return sum(one.size_bytes for one in peak(list(holds(GrpoOptions(**options), work))))

    assert total(tokens_per_microbatch=1000) < total()
    assert total(gradient_checkpointing=True) < total()
    assert total(logprob_chunk=64) <= total()


@pytest.mark.parametrize(("kind", "unpacked"), [("int8", 8), ("nf4", 6)])
def test_a_rounded_bases_largest_weight_is_there_in_full_while_it_is_used(model_of, kind, unpacked):
    directory = model_of()
    largest = max(out * into for out, into in read(directory).linear().values())

    def worked_on(**lora):
        parts = holds(GrpoOptions(lora=lora, tokens_per_microbatch=1), workload(directory, groups=1, reply=2))
        return sum(one.size_bytes for one in parts if one.what in ("activations", "gradients", "logits and work"))

    grown = worked_on(quantization=kind) - worked_on()
    assert 0 < grown <= unpacked * largest, "at the fullest of three moments"


def test_shared_weights_are_named_as_one_copy_with_the_engines(model_of):
    parts = list(holds(GrpoOptions(), workload(model_of(), transport="posix_shm")))
    assert [one.shared for one in parts if one.what == "parameters"] == ["weights"]


def test_sizes_are_first_the_defaults_and_compute_layers_again_only_if_four_sequences_do_not_fit(model_of):
    free = ("tokens_per_microbatch", "gradient_checkpointing")
    work = workload(model_of(), groups=64, size=8, reply=200)
    found = sizes(GrpoOptions(), work, free)
    assert found[0] == (0, {"tokens_per_microbatch": 16384, "gradient_checkpointing": False})
    assert [one.slower for one in found] == sorted(one.slower for one in found)
    sequence = min(work.prompt_tokens + work.max_tokens, read(work.context.model).longest)
    awake = [one.values["tokens_per_microbatch"] for one in found if not one.values["gradient_checkpointing"]]
    assert awake == sorted(awake, reverse=True) and SEQUENCES * sequence <= awake[-1] < 2 * SEQUENCES * sequence
    assert found[-1].values == {"tokens_per_microbatch": sequence, "gradient_checkpointing": True}


def test_sizes_of_options_that_are_set_are_not_offered(model_of):
    work = workload(model_of(), groups=64, size=8, reply=200)
    kept = sizes(GrpoOptions(tokens_per_microbatch=5000), work, ("gradient_checkpointing",))
    assert [one.values for one in kept] == [{"gradient_checkpointing": False}, {"gradient_checkpointing": True}]
    again = sizes(GrpoOptions(gradient_checkpointing=True), work, ("tokens_per_microbatch",))
    assert all(one.values.keys() == {"tokens_per_microbatch"} for one in again)


def test_no_micro_batch_is_offered_that_only_differs_beyond_what_a_batch_can_fill(model_of):
    found = sizes(GrpoOptions(), workload(model_of(), groups=1, size=2, reply=20), ("tokens_per_microbatch",))
    assert [one.values["tokens_per_microbatch"] for one in found] == [16384, 32, 28], "a batch has 8 + 2 * 20 tokens"
