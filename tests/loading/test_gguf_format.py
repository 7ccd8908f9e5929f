import re
import struct

import gguf
import numpy as np
import pytest

from jaxinfer.loading.gguf_format import read_gguf
from jaxinfer.loading.tensor_source import CheckpointError
from tests.loading.tiny_gguf import write_gguf, write_tiny


@pytest.fixture
def tiny(tmp_path):
    return write_tiny(tmp_path / "tiny.gguf", "llama")


def refused(path, content: bytes) -> str:
    """The error for a file of that content: one line that names the file."""
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def header(
    tensors: int, values: int, rest: bytes = b"", *, magic: bytes = b"GGUF", version: int = 3
) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, values) + rest


def string(text: str | bytes) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def table_entry(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


def test_values_of_every_type_are_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "values.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_float32("f32", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 🙂")
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float64("f64", 1e-300)
    writer.add_array("strings", ["a", "", "日本"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.25])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = read_gguf(tmp_path / "values.gguf").metadata
    assert values.pop("ints").tolist() == [1, -2, 3]
    assert values.pop("floats").tolist() == [0.5, -1.25]
    assert values == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -100,
        "u16": 60_000,
        "i16": -30_000,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "f32": 0.5,
        "yes": True,
        "text": "naïve 🙂",
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 1e-300,
        "strings": ["a", "", "日本"],
    }


def test_the_tensor_table_equals_the_gguf_librarys(tiny):
    file = read_gguf(tiny)
    reader = gguf.GGUFReader(tiny)
    assert file.tensors.keys() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(tensor.shape.tolist()[::-1])
        assert (ours.kind, ours.offset, ours.num_bytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert np.array_equal(file.tensor_rows(ours).view(np.float32).ravel(), tensor.data.ravel())


def test_another_alignment_is_followed(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(256)
    weights = {name: np.full((3, 5), float(i), np.float32) for i, name in enumerate(("a", "b"))}
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "a.gguf")
    for name, weight in weights.items():
        assert file.tensors[name].offset % 256 == 0
        assert np.array_equal(file.tensor_rows(file.tensors[name]).view(np.float32), weight)


def test_a_file_cut_anywhere_in_its_header_is_refused(tiny, tmp_path):
    content = tiny.read_bytes()
    data_start = min(tensor.offset for tensor in read_gguf(tiny).tensors.values())
    for length in (*range(1, 200), *range(200, data_start, 13)):
        refused(tmp_path / "cut.gguf", content[:length])


def test_a_file_cut_in_its_data_names_a_tensor_that_is_gone(tiny, tmp_path):
    content = tiny.read_bytes()
    tensors = sorted(read_gguf(tiny).tensors.values(), key=lambda tensor: tensor.offset)
    for tensor in tensors:
        message = refused(tmp_path / "cut.gguf", content[: tensor.offset + tensor.num_bytes - 1])
        named = re.search(r"tensor '([^']+)' needs bytes", message)
        assert named is not None
        assert named[1] in [later.name for later in tensors[tensors.index(tensor) :]]


def test_a_damaged_header_is_refused_or_read_never_a_crash(tiny, tmp_path):
    content = bytearray(tiny.read_bytes())
    data_start = min(tensor.offset for tensor in read_gguf(tiny).tensors.values())
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    outcomes = {True: 0, False: 0}
    for _ in range(200):
        damaged = bytearray(content)
        for position in rng.integers(0, data_start, rng.integers(1, 4)):
            damaged[position] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except CheckpointError:
            outcomes[False] += 1
        else:
            outcomes[True] += 1
    assert outcomes[True] > 0
    assert outcomes[False] > 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"GG", "is not a GGUF file: it starts with b'GG'"),
        (header(0, 0, magic=b"PK\x03\x04"), "is not a GGUF file"),
        (header(0, 0, version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(2**60, 0), "the file ends at 24"),
        (header(0, 2**60), "the file ends at 24"),
        (header(0, 1, string("k") + struct.pack("<I", 99) + bytes(20)), "unknown value type 99"),
        (header(0, 1, struct.pack("<Q", 2**63) + bytes(20)), "metadata entry 1 of 1"),
        (header(0, 1, string("k") + struct.pack("<IQ", 8, 2**40) + bytes(9)), "metadata 'k'"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 4, 2**40) + bytes(9)), "metadata 'k'"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 8, 2**40) + bytes(9)), "metadata 'k'"),
        (header(0, 1, string("k") + struct.pack("<IIQQ", 9, 8, 1, 2**40) + bytes(9)), "metadata 'k'"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(20)), "array of arrays"),
        (header(0, 1, string("k") + struct.pack("<I", 8) + string(b"\xff\xfe")), "not UTF-8"),
        (header(0, 1, string("k") + struct.pack("<IIQ", 9, 8, 1) + string(b"\xff")), "'k'[0] is not UTF-8"),
        (header(0, 2, (string("k") + struct.pack("<I?", 7, True)) * 2), "'k' is given twice"),
        (header(1, 0, table_entry("t", [4, 0])), "tensor 't' has a dimension of size 0: [0, 4]"),
        (header(1, 0, string("t") + struct.pack("<I", 0) + bytes(12)), "tensor 't' has rank 0"),
        (header(1, 0, string("t") + struct.pack("<I", 9) + bytes(99)), "tensor 't' has rank 9"),
        (header(1, 0, table_entry("t", [4], kind=1234)), "tensor 't' has the unknown tensor type 1234"),
        (header(1, 0, table_entry("t", [31], kind=8)), "tensor 't' has rows of 31 elements"),
        (header(1, 0, table_entry("t", [4], offset=7)), "tensor 't' starts at offset 7"),
        (header(1, 0, table_entry("t", [2**40, 2**40])), "tensor 't' needs bytes"),
        (header(1, 0, table_entry("t", [4], offset=2**63)), "tensor 't' needs bytes"),
        (header(2, 0, table_entry("t", [4]) * 2 + bytes(99)), "tensor 't' is listed twice"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, content, problem):
    assert problem in refused(tmp_path / "bad.gguf", content)


@pytest.mark.parametrize("alignment", [0, 3, "32"])
def test_an_impossible_alignment_is_refused(tmp_path, alignment):
    path = write_gguf(tmp_path / "a.gguf", "llama", {}, values={"general.alignment": alignment})
    assert "general.alignment must be a power of two" in refused(path, path.read_bytes())


def test_a_missing_file_and_a_directory_say_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(CheckpointError, match="is a directory"):
        read_gguf(tmp_path)
