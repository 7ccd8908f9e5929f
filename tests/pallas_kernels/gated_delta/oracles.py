"""The gated delta rule and the convolution before it as plain float64 loops over rows, heads and columns."""

from __future__ import annotations

import numpy as np


def gated_delta(
    query, key, value, log_decay, beta, *, initial_state, lengths=None, checkpoint_columns=None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(output, final state, checkpoints); NaN where a checkpoint column does not exist."""
    batch, q_len, num_value_heads, value_dim = value.shape
    key_dim, per_key = key.shape[3], num_value_heads // key.shape[2]
    output = np.zeros((batch, q_len, num_value_heads, value_dim))
    final = np.zeros((batch, num_value_heads, key_dim, value_dim))
    history = np.full((batch, q_len + 1, *final.shape[1:]), np.nan)  # [B, columns done, nv, dk, dv]
    for row in range(batch):
        length = q_len if lengths is None else int(lengths[row])
        for head in range(num_value_heads):
            state = np.asarray(initial_state[row, head], np.float64)
            history[row, 0, head] = state
            for column in range(q_len):
                if column < length:
                    at = row, column, head // per_key
                    k, q = unit(key[at]), unit(query[at]) / np.sqrt(key_dim)
                    at = row, column, head
                    state = np.exp(np.float64(log_decay[at])) * state
                    written = np.float64(beta[at]) * (np.asarray(value[at], np.float64) - state.T @ k)
                    state = state + np.outer(k, written)
                    output[at] = state.T @ q
                history[row, column + 1, head] = state
            final[row, head] = state
    if checkpoint_columns is None:
        return output, final, None
    saved = np.zeros((*checkpoint_columns.shape, *final.shape[1:]))
    for (row, slot), column in np.ndenumerate(checkpoint_columns):
        if column != -1:
            saved[row, slot] = history[row, column] if 0 <= column <= q_len else np.nan
    return output, final, saved


def unit(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.sum(x * x) + 1e-6)


def causal_conv(x, weight, *, history, lengths=None) -> tuple[np.ndarray, np.ndarray]:
    """(output [B, T, C], history after the real columns [B, K - 1, C]), one sum of products an element."""
    batch, q_len, channels = x.shape
    width = weight.shape[1]
    output = np.zeros((batch, q_len, channels))
    after = np.zeros((batch, width - 1, channels))
    for row in range(batch):
        length = q_len if lengths is None else int(lengths[row])
        for channel in range(channels):
            past = np.asarray(history[row, :, channel], np.float64)
            for column in range(length):
                window = np.append(past, np.float64(x[row, column, channel]))
                output[row, column, channel] = window @ np.asarray(weight[channel], np.float64)
                past = window[1:]
            after[row, :, channel] = past
    return output, after
