"""The bodies of the protocol, read and written next to google's own library, which has the same messages by their numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from atropos_core.errors import DataError
from atropos_tinker_api.wire.answers import Sample, TopLogprobs, forward_backward_output, sample_response
from atropos_tinker_api.wire.tensors import read_tensor
from atropos_tinker_api.wire.training_request import addressed, is_forward_only, read_request

F = descriptor_pb2.FieldDescriptorProto
KINDS = {
    "str": F.TYPE_STRING,
    "bytes": F.TYPE_BYTES,
    "i32": F.TYPE_INT32,
    "i64": F.TYPE_INT64,
    "bool": F.TYPE_BOOL,
    "f64": F.TYPE_DOUBLE,
}
# message -> field -> (number, type, repeated); a name in capitals is another message
MESSAGES: dict[str, dict[str, tuple[int, str, bool]]] = {
    "ForwardBackwardRequest": {
        "model_id": (1, "str", False), "seq_id": (2, "i32", False), "data": (3, "Datum", True), "loss_fn": (4, "str", False),
        "forward_only": (6, "bool", False), "config": (7, "ConfigEntry", True),
    },
    "ConfigEntry": {"key": (1, "str", False), "value": (2, "ConfigValue", False)},
    "ConfigValue": {"number": (1, "f64", False), "text": (2, "str", False)},
    "Datum": {"model_input": (1, "Chunk", True), "inputs": (2, "InputEntry", True)},
    "InputEntry": {"key": (1, "str", False), "value": (2, "Tensor", False)},
    "Chunk": {"encoded_text": (1, "Text", False), "image": (2, "Image", False), "dmel": (3, "Text", False)},
    "Text": {"tokens": (1, "bytes", False)},
    "Image": {"data": (1, "bytes", False), "format": (2, "str", False)},
    "Tensor": {"dense": (1, "bytes", False), "sparse": (2, "Sparse", False), "dtype": (3, "i32", False), "shape": (4, "i64", True)},
    "Sparse": {"values": (1, "bytes", False), "crow": (2, "bytes", False), "columns": (3, "bytes", False)},
    "Output": {"type": (1, "str", False), "outputs": (2, "Record", True), "metrics": (3, "MetricEntry", True)},
    "MetricEntry": {"key": (1, "str", False), "value": (2, "f64", False)},
    "Record": {"tag": (1, "str", False), "fields": (2, "FieldEntry", True), "num": (3, "i64", False)},
    "FieldEntry": {"key": (1, "str", False), "value": (2, "Batched", False)},
    "Batched": {"data": (1, "bytes", False), "offsets": (2, "bytes", False), "dtype": (3, "i32", False), "trailing": (4, "i64", True)},
    "Response": {"sequences": (1, "Sequence", True), "prompt_logprobs": (2, "bytes", False), "prompt_top": (3, "Top", False)},
    "Sequence": {"reason": (1, "i32", False), "tokens": (2, "bytes", False), "logprobs": (3, "bytes", False), "top": (4, "Top", False)},
    "Top": {"ids": (1, "bytes", False), "logprobs": (2, "bytes", False), "k": (3, "i32", False), "length": (4, "i32", False)},
}  # fmt: skip


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="oracle.proto", package="oracle", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, repeated) in fields.items():
            made = message.field.add(name=field, number=number)
            made.label = F.LABEL_REPEATED if repeated else F.LABEL_OPTIONAL
            made.type = KINDS.get(kind, F.TYPE_MESSAGE)
            if kind not in KINDS:
                made.type_name = f".oracle.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"oracle.{name}")) for name in MESSAGES}


ORACLE = _classes()


def tensor(values: Any) -> Any:
    array = np.asarray(values)
    dtype = 1 if array.dtype.kind == "f" else 2
    return ORACLE["Tensor"](
        dense=array.astype("<f4" if dtype == 1 else "<i8").tobytes(), dtype=dtype, shape=list(array.shape)
    )


def request(**more: Any) -> Any:
    made = ORACLE["ForwardBackwardRequest"](model_id="m", seq_id=7, loss_fn="ppo", **more)
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    datum.model_input.add().encoded_text.tokens = np.array([3], "<i4").tobytes()
    datum.inputs.add(key="target_tokens", value=tensor([2, 3, 4]))
    datum.inputs.add(key="advantages", value=tensor([0.5, -1.0, 2.0]))
    made.config.add(key="clip_low_threshold").value.number = 0.8
    return made


def test_a_request_is_read_as_it_was_written() -> None:
    body = request(forward_only=True).SerializeToString()
    read = read_request(body)
    assert (read.model_id, read.seq_id, read.loss, read.forward_only) == ("m", 7, "ppo", True)
    assert read.settings == {"clip_low_threshold": 0.8}
    [datum] = read.data
    assert datum.tokens.tolist() == [1, 2, 3] and datum.tokens.dtype == np.int32
    assert datum.inputs["target_tokens"].tolist() == [2, 3, 4]
    assert datum.inputs["advantages"].tolist() == [0.5, -1.0, 2.0]
    assert addressed(body) == ("m", 7) and is_forward_only(body)
    assert not is_forward_only(request().SerializeToString())


def test_a_negative_sequence_id_stays_negative() -> None:
    body = ORACLE["ForwardBackwardRequest"](model_id="m", seq_id=-3).SerializeToString()
    assert addressed(body) == ("m", -3)


def test_a_sparse_tensor_is_made_dense() -> None:
    sent = ORACLE["Tensor"](dtype=1, shape=[2, 4])
    sent.sparse.values = np.array([5, 6, 7], "<f4").tobytes()
    sent.sparse.crow = np.array([0, 1, 3], "<i8").tobytes()
    sent.sparse.columns = np.array([3, 0, 2], "<i8").tobytes()
    read = read_tensor(memoryview(sent.SerializeToString()), "weights")
    assert read.tolist() == [[0, 0, 0, 5], [6, 0, 7, 0]]


@pytest.mark.parametrize(
    ("crow", "columns", "shape"),
    [([0, 1], [3, 0, 2], [2, 4]), ([0, 1, 3], [3, 0, 4], [2, 4]), ([0, 3, 1], [3, 0, 2], [2, 4]), ([0, 1, 2], [3, 0, 2], [2, 4]),
     ([0, 1, 3], [3, 0, -1], [2, 4]), ([0, 1, 3], [3, 0, 2], [8])],
)  # fmt: skip
def test_a_sparse_tensor_whose_indices_do_not_fit_is_refused(
    crow: list[int], columns: list[int], shape: list[int]
) -> None:
    sent = ORACLE["Tensor"](dtype=1, shape=shape)
    sent.sparse.values = np.array([5, 6, 7], "<f4").tobytes()
    sent.sparse.crow = np.array(crow, "<i8").tobytes()
    sent.sparse.columns = np.array(columns, "<i8").tobytes()
    with pytest.raises(DataError, match="weights is sparse"):
        read_tensor(memoryview(sent.SerializeToString()), "weights")


def test_a_shape_of_huge_numbers_takes_no_memory() -> None:
    for shape in ([1 << 62, 1 << 62], [1 << 40], [-1, 4], [1, 2, 3]):
        sent = ORACLE["Tensor"](dtype=1, shape=shape, dense=b"1234")
        with pytest.raises(DataError):
            read_tensor(memoryview(sent.SerializeToString()), "weights")
    sparse = ORACLE["Tensor"](dtype=1, shape=[1, 1 << 50])
    sparse.sparse.crow = np.array([0, 0], "<i8").tobytes()
    with pytest.raises(DataError, match="at most 16,777,216 elements"):
        read_tensor(memoryview(sparse.SerializeToString()), "weights")


def test_images_are_refused_by_name() -> None:
    made = request()
    made.data[0].model_input.add().image.data = b"png"
    with pytest.raises(DataError, match="sequence 0 has an image"):
        read_request(made.SerializeToString())


def test_damaged_bodies_are_data_errors_and_nothing_else() -> None:
    """Bytes changed, cut and doubled at random places. What can still be read is read."""
    whole = request().SerializeToString()
    dice = random.Random(3)
    refused = 0
    for _ in range(4000):
        body = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            body[dice.randrange(len(body))] = dice.randrange(256)
        cut = dice.randrange(len(body) + 1)
        for damaged in (bytes(body), bytes(body[:cut]), bytes(body[cut:] + body)):
            try:
                read_request(damaged)
            except DataError:
                refused += 1
    assert refused > 3000


def test_an_output_is_what_the_other_library_reads() -> None:
    one, two = np.array([-1.5, -2.5], np.float32), np.array([[-1.0, -2.0], [-3.0, -4.0]], np.float32)
    body = forward_backward_output([one, one[:1], two], {"loss:sum": 3.25})
    read = ORACLE["Output"].FromString(body)
    assert read.type == "ArrayRecord" and {one.key: one.value for one in read.metrics} == {"loss:sum": 3.25}
    assert [record.num for record in read.outputs] == [2, 1]  # a record's arrays have one trailing shape
    first, second = (record.fields[0].value for record in read.outputs)
    assert np.frombuffer(first.data, "<f4").tolist() == [-1.5, -2.5, -1.5]
    assert np.frombuffer(first.offsets, "<i8").tolist() == [0, 8, 12] and not first.trailing
    assert list(second.trailing) == [2] and np.frombuffer(second.data, "<f4").tolist() == [-1, -2, -3, -4]


def test_samples_are_what_the_other_library_reads() -> None:
    top = TopLogprobs(np.array([[4, 5]], np.int32), np.array([[-0.1, -0.2]], np.float32))
    samples = [
        Sample(np.array([9], np.int32), np.array([-0.5], np.float32), True, top),
        Sample(np.array([8, 7], np.int32), np.array([-1, -2], np.float32), False),
    ]
    body = sample_response(samples, np.array([np.nan, -3], np.float32), top)
    read = ORACLE["Response"].FromString(body)
    assert [one.reason for one in read.sequences] == [0, 1]
    assert np.frombuffer(read.sequences[1].tokens, "<i4").tolist() == [8, 7]
    assert np.isnan(np.frombuffer(read.prompt_logprobs, "<f4")[0])
    assert (read.prompt_top.k, read.prompt_top.length) == (2, 1)
    assert np.frombuffer(read.sequences[0].top.ids, "<i4").tolist() == [4, 5]
    assert not read.sequences[1].HasField("top")
