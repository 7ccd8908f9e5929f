"""Span attention in numpy float64, one query at a time; imports neither package."""

import numpy as np


def span_attention(
    query, key, value, span_lo, span_hi, sinks=None, *, softmax_scale, logits_soft_cap=None
) -> np.ndarray:
    """query [B, T, N, H], key and value [B, K, S, H], spans [B, T]; returns float64 [B, T, N, H]."""
    batch, q_len, num_q_heads, _ = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    out = np.zeros(query.shape)
    for b in range(batch):
        for t in range(q_len):
            rows = slice(max(int(span_lo[b, t]), 0), min(int(span_hi[b, t]), kv_len - 1) + 1)
            if rows.start >= rows.stop:
                continue
            for n in range(num_q_heads):
                k = n // (num_q_heads // num_kv_heads)
                logits = softmax_scale * key[b, k, rows].astype(float) @ query[b, t, n].astype(float)
                if logits_soft_cap is not None:
                    logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
                logits = np.append(logits, [] if sinks is None else sinks[n])
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                out[b, t, n] = weights[: rows.stop - rows.start] @ value[b, k, rows].astype(float)
    return out
