"""Random rows of logits of the kinds that break samplers, from a seed."""

import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling import Sampling, sample, stack_sampling

KINDS = ("normal", "ties", "flat", "two values", "extreme", "mostly -inf", "signed zeros")


def random_logits(kind: str, seed: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(size)
    logits = {
        "normal": 4 * normal,
        "ties": np.round(2 * normal),
        "flat": np.full(size, normal[0]),
        "two values": np.where(normal > 1, 3.0, 2.5),
        "extreme": normal * 10.0 ** rng.integers(-30, 38, size),
        "mostly -inf": np.where(normal > np.sort(normal)[-min(3, size)] - 1e-9, normal, -np.inf),
        "signed zeros": np.where(normal > 0, 0.0, -0.0) - (normal < -1),
    }[kind]
    return logits.astype(np.float32)


def draw(logits: np.ndarray, samplings: list[Sampling], *, index=0, seen=None):
    """`sample` on numpy arrays; `index` is one for all rows or one a row."""
    batch = len(samplings)
    return sample(
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (batch, np.shape(logits)[-1])),
        stack_sampling(samplings),
        index=jnp.broadcast_to(jnp.asarray(index, jnp.int32), (batch,)),
        seen=None if seen is None else jnp.asarray(seen),
    )
