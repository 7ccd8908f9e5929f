import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.loading import tensor_source
from jaxinfer.loading.safetensors_source import SafetensorsSource
from jaxinfer.loading.tensor_source import CheckpointError


def weights(seed: int = 0, dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"matrix": (7, 5), "vector": (6,), "stack": (2, 3, 4), "scalar": ()}
    return {f"{name}.{seed}": rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write_sharded(directory, shards: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    weight_map = {}
    for number, shard in enumerate(shards):
        file = f"model-{number}.safetensors"
        save_file(shard, directory / file)
        weight_map |= dict.fromkeys(shard, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def raw_file(header: object, data: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def refused(directory) -> str:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(directory)
    assert str(caught.value).startswith(str(directory))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("stored", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("block_elements", [1, 1 << 17])
def test_tensors_are_read_and_rounded(tmp_path, monkeypatch, stored, dtype, block_elements):
    monkeypatch.setattr(tensor_source, "BLOCK_ELEMENTS", block_elements)
    tensors = weights(dtype=stored)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsSource(tmp_path)
    assert source.names() == tensors.keys()
    for name, tensor in tensors.items():
        assert source.shape(name) == tensor.shape
        read = source.read(name, dtype)
        assert read.dtype == dtype
        assert np.array_equal(read, tensor.astype(dtype))


def test_shards_are_one_source(tmp_path):
    tensors = write_sharded(tmp_path, [weights(0), weights(1)])
    source = SafetensorsSource(tmp_path)
    assert source.names() == tensors.keys()
    assert all(np.array_equal(source.read(name, np.float32), tensors[name]) for name in tensors)
    assert [file.name for file in source.files] == ["model-0.safetensors", "model-1.safetensors"]


def test_norm_scales_are_as_the_family_defines_them(tmp_path):
    save_file(weights(), tmp_path / "model.safetensors")
    assert SafetensorsSource(tmp_path).norm_scales_include_one is False


def test_a_deleted_shard_is_named(tmp_path):
    write_sharded(tmp_path, [weights(0), weights(1)])
    (tmp_path / "model-1.safetensors").unlink()
    assert refused(tmp_path) == (
        f"{tmp_path}/model-1.safetensors: is missing, but model.safetensors.index.json names it"
    )


def test_a_tensor_that_the_index_promises_must_be_in_its_file(tmp_path):
    write_sharded(tmp_path, [weights(0), weights(1)])
    save_file({"other": np.ones(2, np.float32)}, tmp_path / "model-1.safetensors")
    assert "model-1.safetensors: lacks tensor " in refused(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for file in ("a", "b"):
        save_file({"same": np.ones(2, np.float32)}, tmp_path / f"{file}.safetensors")
    assert "b.safetensors: tensor 'same' is in a.safetensors too" in refused(tmp_path)


def test_a_directory_without_weights_says_so(tmp_path):
    assert refused(tmp_path) == f"{tmp_path}: holds no .safetensors file"


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        refused(tmp_path)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is 0 bytes long"),
        (b"PK\x03\x04" + bytes(60), "promises a header of"),
        (struct.pack("<Q", 2**60), "promises a header of"),
        (struct.pack("<Q", 3) + b"{a}", "its header is not JSON"),
        (struct.pack("<Q", 3) + b"\xff\xfe\xfd", "its header is not JSON"),
        (raw_file([1]), "its header is not a JSON object"),
        (raw_file({"t": 5}), "the header entry of tensor 't' is damaged"),
        (raw_file({"t": {"dtype": "F32"}}), "the header entry of tensor 't' is damaged"),
        (raw_file({"t": entry(offsets=(0,))}), "the header entry of tensor 't' is damaged"),
        (raw_file({"t": entry("F13")}, bytes(8)), "tensor 't' has the unknown dtype 'F13'"),
        (
            raw_file({"t": entry(shape=(0, 2), offsets=(0, 0))}),
            "tensor 't' has a dimension of size 0: [0, 2]",
        ),
        (raw_file({"t": entry(shape=(-2, -1))}, bytes(8)), "tensor 't' has a dimension of size 0"),
        (raw_file({"t": entry(shape=(3,))}, bytes(8)), "needs 12 bytes, but its entry spans 0 to 8"),
        (raw_file({"t": entry(offsets=(-4, 4))}, bytes(8)), "spans -4 to 4"),
        (raw_file({"t": entry(offsets=(4, 12))}, bytes(8)), "needs data bytes 4 to 12, but the file holds 8"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, content, problem):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert problem in refused(tmp_path)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("{", "is not an index"),
        ("[]", "is not an index"),
        ("{}", "is not an index"),
        ('{"weight_map": {}}', "must map tensor names to files"),
        ('{"weight_map": {"t": "../secret"}}', "which is not a file name"),
        ('{"weight_map": {"t": 1}}', "which is not a file name"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path, index, problem):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert problem in refused(tmp_path)


def test_integers_are_not_weights(tmp_path):
    save_file({"ids": np.ones((2, 2), np.int64)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    with pytest.raises(
        CheckpointError, match="tensor 'ids' is stored as I64; weights are F64, F32, F16, BF16"
    ):
        source.read("ids", np.float32)


def test_a_name_that_is_not_there_and_another_dtype_are_refused(tmp_path):
    save_file(weights(), tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    with pytest.raises(CheckpointError, match="has no tensor 'nope'"):
        source.read("nope", np.float32)
    with pytest.raises(ValueError, match="takes dtype float32 or bfloat16; got float16"):
        source.read("matrix.0", np.float16)


def test_a_tensor_is_read_into_the_array_that_is_given(tmp_path):
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    save_file({"matrix": values}, tmp_path / "model.safetensors")
    out = np.zeros((2, 6), np.float32)
    source = SafetensorsSource(tmp_path)
    assert np.shares_memory(source.read("matrix", np.float32, out), out)
    assert np.array_equal(out.reshape(4, 3), values)
    with pytest.raises(ValueError, match=r"read\(out=.*float32 array of 12 elements; got float32 \(5,\)"):
        source.read("matrix", np.float32, np.zeros(5, np.float32))


def test_a_tensor_can_be_read_again_after_its_pages_were_let_go(tmp_path):
    values = np.random.default_rng(0).normal(size=(600, 40)).astype(np.float32)
    save_file({"matrix": values, "other": values + 1}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for _ in range(2):
        assert np.array_equal(source.read("matrix"), values)
        assert np.array_equal(source.read("other"), values + 1)
