"""`routed_mlp` equals every expert run on every row, and costs no more than the chosen ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops import routed_mlp

D, F = 24, 10
IMPLEMENTATIONS = ("blocked", "ragged")


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def draw(num_rows, num_experts, per_token, *, seed=0, chosen=None):
    """Arguments of `routed_mlp` in float32; `chosen` limits which experts are ever chosen."""
    random = np.random.RandomState(seed)
    pool = np.arange(num_experts) if chosen is None else np.asarray(chosen)
    x = random.randn(num_rows, D)
    gate_up = random.randn(num_experts, 2, F, D) / D**0.5
    down = random.randn(num_experts, D, F) / F**0.5
    ids = np.stack([random.permutation(pool)[:per_token] for _ in range(num_rows)])
    weights = random.rand(num_rows, per_token)
    return (
        *(a.astype(np.float32) for a in (x, gate_up, down)),
        ids.astype(np.int32),
        weights.astype(np.float32),
    )


def silu(x):
    return x / (1 + np.exp(-x))


def every_expert(x, gate_up, down, ids, weights):
    """All experts on all rows in float64, weighted by zero where not chosen."""
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))
    share = np.zeros((x.shape[0], gate_up.shape[0]))
    np.add.at(share, (np.arange(x.shape[0])[:, None], ids), weights)
    gate, up = (np.einsum("nd,efd->nef", x, gate_up[:, part]) for part in (0, 1))
    return np.einsum("nef,edf,ne->nd", silu(gate) * up, down, share)


def every_expert_jax(x, gate_up, down, ids, weights):
    share = jnp.zeros((x.shape[0], gate_up.shape[0])).at[jnp.arange(x.shape[0])[:, None], ids].add(weights)
    gate, up = (jnp.einsum("nd,efd->nef", x, gate_up[:, part]) for part in (0, 1))
    return jnp.einsum("nef,edf,ne->nd", jax.nn.silu(gate) * up, down, share)


@functools.partial(jax.jit, static_argnames="implementation")
def run(*args, implementation=None):
    return routed_mlp(*args, activation=jax.nn.silu, implementation=implementation)


CASES = {
    "one row": (1, 8, 2, None),
    "decode": (8, 8, 3, None),
    "just past decode": (9, 8, 2, None),
    "more experts than pairs": (3, 64, 2, None),
    "every expert": (5, 4, 4, None),
    "one expert": (40, 1, 1, None),
    "uneven segments": (70, 5, 1, [0, 3]),
    "several large blocks": (300, 3, 2, None),
    "the last expert only": (20, 6, 1, [5]),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_equals_every_expert_on_every_row(case, implementation):
    num_rows, num_experts, per_token, chosen = CASES[case]
    args = draw(num_rows, num_experts, per_token, chosen=chosen)
    out = run(*args, implementation=implementation)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, every_expert(*args), atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_rows", [1, 30])
def test_bfloat16_weights_are_close(num_rows, implementation):
    x, gate_up, down, ids, weights = draw(num_rows, 6, 2)
    x, gate_up, down = (jnp.asarray(a, jnp.bfloat16) for a in (x, gate_up, down))
    out = run(x, gate_up, down, ids, weights, implementation=implementation)
    assert out.dtype == jnp.float32
    exact = every_expert(*(np.asarray(a, np.float32) for a in (x, gate_up, down)), ids, weights)
    np.testing.assert_allclose(out, exact, atol=0.02)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_rows", [4, 50])
def test_a_row_does_not_influence_another_whatever_it_holds(num_rows, implementation):
    x, gate_up, down, ids, weights = draw(num_rows, 4, 2)
    clean = run(x, gate_up, down, ids, weights, implementation=implementation)
    for garbage in (np.nan, np.inf, 1e30):
        dirty = x.copy()
        dirty[1::3] = garbage
        out = run(dirty, gate_up, down, ids, weights, implementation=implementation)
        kept = np.arange(num_rows) % 3 != 1
        np.testing.assert_array_equal(np.asarray(out)[kept], np.asarray(clean)[kept])


@pytest.mark.parametrize("bad", [-1, 4])
def test_an_unknown_expert_makes_its_row_nan_and_no_other(bad):
    x, gate_up, down, ids, weights = draw(6, 4, 2)
    clean = run(x, gate_up, down, ids, weights)
    ids[2, 1] = bad
    out = np.asarray(run(x, gate_up, down, ids, weights))
    assert np.isnan(out[2]).all()
    others = np.arange(6) != 2
    np.testing.assert_allclose(out[others], np.asarray(clean)[others], atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ["decode", "uneven segments", "several large blocks"])
def test_gradients_equal_those_of_every_expert(case, implementation):
    num_rows, num_experts, per_token, chosen = CASES[case]
    x, gate_up, down, ids, weights = draw(num_rows, num_experts, per_token, chosen=chosen)
    cotangent = np.random.RandomState(9).randn(num_rows, D).astype(np.float32)

    def loss(function):
        return lambda x, gate_up, down, weights: jnp.vdot(function(x, gate_up, down, ids, weights), cotangent)

    routed = functools.partial(run, implementation=implementation)
    got = jax.jit(jax.grad(loss(routed), argnums=(0, 1, 2, 3)))(x, gate_up, down, weights)
    expected = jax.jit(jax.grad(loss(every_expert_jax), argnums=(0, 1, 2, 3)))(x, gate_up, down, weights)
    for name, a, b in zip(("x", "gate_up", "down", "weights"), got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4, err_msg=name)


def test_gradients_in_bfloat16_keep_the_dtypes_and_are_close():
    x, gate_up, down, ids, weights = draw(40, 4, 2)
    args = (*(jnp.asarray(a, jnp.bfloat16) for a in (x, gate_up, down)), weights)

    def loss(function):
        return lambda x, gate_up, down, weights: jnp.sum(function(x, gate_up, down, ids, weights) ** 2)

    got = jax.jit(jax.grad(loss(run), argnums=(0, 1, 2, 3)))(*args)
    exact = jax.jit(jax.grad(loss(every_expert_jax), argnums=(0, 1, 2, 3)))(*(jnp.float32(a) for a in args))
    for arg, a, b in zip(args, got, exact, strict=True):
        assert a.dtype == arg.dtype
        np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=0.03 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_rows_equals_a_loop(implementation):
    batches = [draw(6, 5, 2, seed=seed) for seed in range(3)]
    _, gate_up, down, _, _ = batches[0]
    x, ids, weights = (np.stack([batch[i] for batch in batches]) for i in (0, 3, 4))
    routed = functools.partial(run, implementation=implementation)
    out = jax.vmap(routed, (0, None, None, 0, 0))(x, gate_up, down, ids, weights)
    for i in range(3):
        np.testing.assert_allclose(out[i], every_expert(x[i], gate_up, down, ids[i], weights[i]), atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_experts_and_over_gradients_equals_a_loop(implementation):
    batches = [draw(6, 5, 2, seed=seed) for seed in range(3)]
    x, gate_up, down, ids, weights = (np.stack(parts) for parts in zip(*batches, strict=True))
    routed = functools.partial(run, implementation=implementation)
    out = jax.jit(jax.vmap(routed))(x, gate_up, down, ids, weights)

    def gradient(function):
        return jax.grad(lambda x, *rest: jnp.sum(function(x, *rest) ** 2), argnums=1)

    grads = jax.jit(jax.vmap(gradient(routed)))(x, gate_up, down, ids, weights)
    for i in range(3):
        args = (x[i], gate_up[i], down[i], ids[i], weights[i])
        np.testing.assert_allclose(out[i], every_expert(*args), atol=1e-5)
        np.testing.assert_allclose(grads[i], jax.jit(gradient(every_expert_jax))(*args), atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_no_second_bank_is_made(num_rows, dtype):
    num_experts, embed_dim, mlp_dim, per_token = 64, 128, 64, 2
    shapes = [
        jax.ShapeDtypeStruct((num_rows, embed_dim), dtype),
        jax.ShapeDtypeStruct((num_experts, 2, mlp_dim, embed_dim), dtype),
        jax.ShapeDtypeStruct((num_experts, embed_dim, mlp_dim), dtype),
        jax.ShapeDtypeStruct((num_rows, per_token), jnp.int32),
        jax.ShapeDtypeStruct((num_rows, per_token), jnp.float32),
    ]
    compiled = jax.jit(functools.partial(run, implementation="blocked")).lower(*shapes).compile()
    expert_bytes = 3 * embed_dim * mlp_dim * jnp.dtype(dtype).itemsize
    pair_bytes = (num_rows * per_token + 128) * embed_dim * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * expert_bytes + 4 * pair_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(gate_up=np.zeros((4, F, 2, D), np.float32)), r"gate_up=\.\.\.\) must be \[4, 2, 2, 24\]"),
        (dict(down=np.zeros((4, F, D), np.float32)), r"down=\.\.\.\) must be \[4, 24, 10\]; got float32"),
        (dict(expert_ids=np.zeros((5, 2), np.int32)), r"expert_ids=\.\.\.\) must be \[6, 2\]"),
        (dict(weights=np.zeros((6, 1), np.float32)), r"weights=\.\.\.\) must be \[6, 2\]"),
        (dict(implementation="dense"), r"must be one of \('blocked', 'ragged'\) or None; got 'dense'"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    names = ("x", "gate_up", "down", "expert_ids", "weights")
    args = dict(zip(names, draw(6, 4, 2), strict=True)) | dict(implementation=None) | change
    with pytest.raises(ValueError, match=message):
        routed_mlp(**args, activation=jax.nn.silu)
