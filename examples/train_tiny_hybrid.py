"""Train a tiny Qwen3.5-shaped model on the language reference inside Python, then let it write.

    python examples/train_tiny_hybrid.py --steps 300

The gradient is `jax.grad` through `jaxinfer.forward` without a state (chunked gated delta rule, span
attention); the text comes out of `jaxinfer.generate`, one token at a time through the cached state. A token
is a byte. Minutes on two cores; needs nothing but what jaxinfer installs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pydoc_data.topics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxinfer as ji
from jaxinfer.config import GatedDeltaConfig
from jaxinfer.testing import random_params, tiny_model


def corpus() -> np.ndarray:
    """The topics of Python's `help()` as bytes, int32."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def untrained() -> ji.Model:
    """Three Gated DeltaNet layers and one of gated full attention, about a million weights."""
    sizes = GatedDeltaConfig(
        num_key_heads=4, num_value_heads=8, key_head_dim=32, value_head_dim=32, conv_width=4
    )
    return dataclasses.replace(
        tiny_model("qwen3_5", embed_dim=128, mlp_dim=352, gated_delta=sizes), chat_template=None
    )


@functools.partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnames=("params", "memory"))
def train_step(params, memory, tokens, *, config, optimizer):
    """Returns (params, optimizer state, mean loss in nats a byte) after one step on int32 [B, T + 1]."""

    def loss(params):
        logits, _ = ji.forward(params, tokens[:, :-1], config=config, logits="all")
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    updates, memory = optimizer.update(gradient, memory, params)
    return optax.apply_updates(params, updates), memory, value


def train(model: ji.Model, args: argparse.Namespace) -> ji.Model:
    """Returns the model with trained weights; prints the loss as it falls."""
    text, rng = corpus(), np.random.default_rng(args.seed)
    rate = optax.warmup_cosine_decay_schedule(0.0, args.rate, args.steps // 10, args.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    params = random_params(model.config, args.seed)
    memory, losses, began = optimizer.init(params), [], time.perf_counter()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{count:,} weights, {text.size:,} bytes of text")
    for step in range(1, args.steps + 1):
        starts = rng.integers(0, text.size - args.length - 1, (args.batch, 1))
        tokens = jnp.asarray(text[starts + np.arange(args.length + 1)])
        params, memory, loss = train_step(params, memory, tokens, config=model.config, optimizer=optimizer)
        losses.append(float(loss))
        if step == 1 or step % args.report == 0:
            recent = np.mean(losses[-args.report :])
            print(f"step {step:4d}  loss {recent:.3f}  {time.perf_counter() - began:.0f} s", flush=True)
    return dataclasses.replace(model, params=params, fingerprint=f"trained-{args.seed}-{args.steps}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--report", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default="The ")
    args = parser.parse_args()
    model = train(untrained(), args)
    sampling = ji.Sampling(temperature=0.5, seed=args.seed)
    prompt = list(args.prompt.encode())
    (answer,) = ji.generate(model, [prompt], max_new_tokens=240, sampling=sampling)
    print(args.prompt + answer.text)


if __name__ == "__main__":
    main()
