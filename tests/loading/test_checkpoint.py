import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.loading import CheckpointError, open_checkpoint
from tests.loading.tiny_gguf import write_tiny


def write_directory(path, scale: float = 1.0):
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"w": np.full(3, scale, np.float32)}, path / "model.safetensors")
    return path


def test_a_directory_is_opened(tmp_path):
    checkpoint = open_checkpoint(write_directory(tmp_path))
    assert checkpoint.config == {"model_type": "llama", "dtype": "float32"}
    assert checkpoint.source.names() == {"w"}
    assert checkpoint.tokenizer is None
    assert checkpoint.chat_template is None


def test_a_config_that_names_no_dtype_has_that_of_the_tensors(tmp_path):
    write_directory(tmp_path)
    save_file({"w": np.zeros(3, ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).config["dtype"] == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    assert "dtype" not in open_checkpoint(tmp_path).config


def test_a_gguf_file_is_opened(tmp_path):
    checkpoint = open_checkpoint(write_tiny(tmp_path / "tiny.gguf", "gemma3"))
    assert checkpoint.config["model_type"] == "gemma3_text"
    assert checkpoint.source.norm_scales_include_one


def test_the_fingerprint_covers_weights_and_config(tmp_path):
    prints = []
    for name, scale, config in (("a", 1.0, "{}"), ("b", 2.0, "{}"), ("c", 1.0, '{"x": 1}'), ("d", 1.0, "{}")):
        (tmp_path / name).mkdir()
        write_directory(tmp_path / name, scale)
        (tmp_path / name / "config.json").write_text(config)
        prints.append(open_checkpoint(tmp_path / name).fingerprint)
    assert prints[0] == prints[3]
    assert len(set(prints)) == 3


def test_what_is_no_checkpoint_says_what_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json$"):
        open_checkpoint(tmp_path)
    write_tiny(tmp_path / "tiny.gguf", "llama")
    with pytest.raises(CheckpointError, match=r"has no config\.json; it holds tiny\.gguf: pass that file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        open_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "nowhere")


def test_a_lone_safetensors_file_is_not_a_checkpoint(tmp_path):
    write_directory(tmp_path)
    with pytest.raises(CheckpointError, match="pass the directory of a safetensors file"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_a_damaged_config_is_named(tmp_path):
    write_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: is not JSON"):
        open_checkpoint(tmp_path)


def test_facts_of_the_image_preprocessor_stand_in_the_config(tmp_path):
    facts = {"image_mean": [0.1, 0.2, 0.3]}
    write_directory(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": facts}))
    assert open_checkpoint(tmp_path).config["preprocessor_config"] == facts
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resample": 3}))
    assert open_checkpoint(tmp_path).config["preprocessor_config"] == {"resample": 3}
