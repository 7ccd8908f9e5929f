"""Params on disk: equal when mapped, never stale, and a load goes on where they cannot be kept."""

import errno
import logging
import os
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.loading import converted, load
from jaxinfer.loading.converted import converted_path, read_converted, write_converted
from tests.loading.tiny_gguf import hugging_face_weights, stored_weights, write_gguf, write_tiny


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("jaxinfer.loading.checkpoint.gguf_tokenizer", lambda file: object())  # it has none
    converted._say_once.cache_clear()
    return tmp_path / "cache" / "converted"


def _params():
    """Any pytree: integers, an odd size that must not move the next leaf, and a float32 scale."""
    return {
        "odd": jnp.arange(3, dtype=jnp.float32),
        "rows": jnp.arange(-64, 64, dtype=jnp.int8).reshape(2, 64),
        "weight": jnp.arange(64, dtype=jnp.bfloat16).reshape(2, 32),
    }


def _shapes(params):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)


def _assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def _refuse(*_):
    raise AssertionError("converted anew")


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_second_load_maps_what_the_first_converted(tmp_path, cache, monkeypatch, arch):
    path = write_tiny(tmp_path / "m.gguf", arch)
    first = load(path)
    assert len(list(cache.glob("*.safetensors"))) == 1
    monkeypatch.setattr("jaxinfer.models.assemble_params", _refuse)
    _assert_equal(load(path).params, first.params)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
def test_any_pytree_comes_back_and_aligned_leaves_are_not_copied(tmp_path):
    params = _params()
    write_converted(tmp_path / "p", params)
    found = read_converted(tmp_path / "p", _shapes(params))
    _assert_equal(found, params)
    assert found is not None
    for name in ("rows", "weight"):
        assert found[name].unsafe_buffer_pointer() % 64 == 0
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [line.split()[0].split("-") for line in lines if line.endswith(str(tmp_path / "p"))]
    spans = [(int(low, 16), int(high, 16)) for low, high in maps]
    assert any(low <= found["weight"].unsafe_buffer_pointer() < high for low, high in spans)


def test_the_file_is_readable_by_the_safetensors_library(tmp_path):
    from safetensors.numpy import load_file

    write_converted(tmp_path / "p", {"a": jnp.arange(5, dtype=jnp.float32)})
    np.testing.assert_array_equal(load_file(tmp_path / "p")["['a']"], np.arange(5, dtype=np.float32))


def test_other_content_dtype_or_code_is_another_file(monkeypatch):
    paths = {converted_path("ab", "bfloat16"), converted_path("ac", "bfloat16"), converted_path("ab", "int8")}
    monkeypatch.setattr(converted, "_code_digest", lambda: "other")
    assert len(paths | {converted_path("ab", "bfloat16")}) == 4


def test_a_changed_checkpoint_is_converted_anew(tmp_path, cache):
    path = write_tiny(tmp_path / "m.gguf", "llama")
    before = np.asarray(load(path).params.embedding)
    weights = hugging_face_weights("llama")
    doubled = stored_weights("llama", {name: 2 * weight for name, weight in weights.items()})
    os.replace(write_gguf(tmp_path / "n.gguf", "llama", doubled), path)
    np.testing.assert_array_equal(np.asarray(load(path).params.embedding), 2 * before)
    assert len(list(cache.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_a_file_of_another_size_is_not_used_and_replaced(tmp_path, cache, damage):
    path = write_tiny(tmp_path / "m.gguf", "llama")
    expected = load(path).params
    [kept] = cache.glob("*.safetensors")
    whole = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(damage(whole))
    _assert_equal(load(path).params, expected)
    assert kept.read_bytes() == whole


def test_mapped_params_outlive_the_file_being_replaced_and_removed(tmp_path):
    params = _params()
    write_converted(tmp_path / "p", params)
    found = read_converted(tmp_path / "p", _shapes(params))
    write_converted(tmp_path / "p", jax.tree.map(jnp.zeros_like, params))
    (tmp_path / "p").unlink()
    _assert_equal(found, params)


def test_several_writers_at_once_leave_one_whole_file(tmp_path):
    params = _params()
    writers = [threading.Thread(target=write_converted, args=(tmp_path / "p", params)) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["p"]
    _assert_equal(read_converted(tmp_path / "p", _shapes(params)), params)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_where_nothing_can_be_kept_loads_go_on_and_say_so_once(tmp_path, cache, monkeypatch, caplog, number):
    def fail(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(converted.os, "fsync", fail)
    path = write_tiny(tmp_path / "m.gguf", "llama")
    with caplog.at_level(logging.WARNING):
        first, second = load(path), load(path)
    _assert_equal(second.params, first.params)
    assert [os.strerror(number) in record.message for record in caplog.records] == [True]
    assert list(cache.iterdir()) == []
