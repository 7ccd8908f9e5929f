"""The whole stack, from files to logits and greedy tokens, agrees with transformers."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.generation.prefill import prefill
from jaxinfer.generation.rows import Options, continue_rows
from jaxinfer.loading.checkpoint import open_checkpoint
from jaxinfer.models import assemble_params, family_of
from tests.oracles.real_models import NEW_TOKENS, load_real_oracles
from tests.oracles.tiny_checkpoints import load_oracle, write_checkpoint

TINY = ("llama", "llama_rope3", "mistral", "qwen3", "qwen3_moe", "gemma3_text")


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module", params=TINY)
def tiny(request, tmp_path_factory):
    """(oracle, config, params) of a checkpoint written to disk and read back."""
    checkpoint = open_checkpoint(write_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))
    family = family_of(checkpoint.config)
    config = dataclasses.replace(family.read_config(checkpoint.config), dtype="float32")
    return load_oracle(request.param), config, assemble_params(config, family, checkpoint.source)


def test_tiny_logits_agree_at_every_position(tiny):
    oracle, config, params = tiny
    logits, _ = ji.forward(params, oracle.inputs["input_ids"].astype(np.int32), config=config, logits="all")
    np.testing.assert_allclose(logits[0], oracle.logits, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(logits[0].argmax(-1), oracle.logits.argmax(-1))


@pytest.mark.parametrize("kv_window", [ji.KvWindowPolicy.off(), ji.KvWindowPolicy.on()], ids=["off", "on"])
def test_tiny_greedy_tokens_agree_with_eviction_off_and_on(tiny, kv_window):
    oracle, config, params = tiny
    tokens = oracle.inputs["input_ids"].astype(np.int32)
    state = ji.init_state(config, capacity=64, max_append=tokens.shape[1], kv_window=kv_window)
    generated = []
    for _ in oracle.greedy_ids:
        logits, state = ji.forward(params, tokens, state, config=config)
        generated.append(int(logits[0].argmax()))
        tokens = np.array([generated[-1:]], np.int32)
    assert generated == oracle.greedy_ids.tolist()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.real(name)) for name in ("smollm2-135m", "gemma3-270m")],
)
def real(request):
    """(model in float32, its oracles)."""
    return ji.load(request.param, dtype="float32"), load_real_oracles(request.param)


def test_real_prompts_have_the_same_token_ids(real):
    model, oracles = real
    for oracle in oracles:
        if isinstance(oracle.prompt, str):
            ids = model.tokenizer.encode(oracle.prompt)
        else:
            ids = model.tokenizer.encode_rendered(model.chat_template.render(oracle.prompt))
        assert ids == oracle.ids.tolist()


@pytest.mark.slow
def test_real_logits_agree(real):
    model, oracles = real
    for oracle in oracles:
        inputs = ji.StepInputs(logit_columns=oracle.positions[None].astype(np.int32))
        logits, _ = ji.forward(
            model.params, oracle.ids[None], config=model.config, inputs=inputs, logits="columns"
        )
        logits = np.asarray(logits[0])
        top = np.take_along_axis(logits, oracle.top_ids, axis=-1)
        np.testing.assert_allclose(top, oracle.top_logits, rtol=0, atol=5e-4)
        columns = oracle.column_logits[oracle.positions]
        np.testing.assert_allclose(logits[:, oracle.columns], columns, rtol=0, atol=5e-4)
        decided = oracle.argmax_gaps[oracle.positions] > 1e-3
        assert decided.mean() > 0.8
        argmax = logits.argmax(-1)[decided]
        np.testing.assert_array_equal(argmax, oracle.argmax_ids[oracle.positions][decided])


@pytest.mark.slow
def test_real_greedy_tokens_agree(real):
    model, oracles = real
    rows = [oracle.ids.tolist() for oracle in oracles]
    # transformers was told to go on past an end token.
    options = dataclasses.replace(Options.checked(model, rows, NEW_TOKENS), eos_token_ids=())
    state = ji.init_state(model.config, batch=len(rows), capacity=2048)
    logits, state = prefill(model.params, rows, state, config=model.config, donate=True)
    _, answers = continue_rows(model, logits, state, rows, options)
    for answer, oracle in zip(answers, oracles, strict=True):
        assert answer.token_ids == oracle.greedy_ids.tolist()
