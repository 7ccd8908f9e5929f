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


def span_attention_gradients(
    query, key, value, span_lo, span_hi, d_out, sinks=None, *, softmax_scale, logits_soft_cap=None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Gradients of sum(out * d_out), float64, by the chain rule of one query at a time."""
    batch, q_len, num_q_heads, _ = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    d_query, d_key, d_value = np.zeros(query.shape), np.zeros(key.shape), np.zeros(value.shape)
    d_sinks = None if sinks is None else np.zeros(sinks.shape)
    for b, t, n in np.ndindex(batch, q_len, num_q_heads):
        k = n // (num_q_heads // num_kv_heads)
        rows = slice(max(int(span_lo[b, t]), 0), min(int(span_hi[b, t]), kv_len - 1) + 1)
        if rows.start >= rows.stop:
            continue
        keys, values, q = (x.astype(float) for x in (key[b, k, rows], value[b, k, rows], query[b, t, n]))
        logits, slope = softmax_scale * keys @ q, 1.0
        if logits_soft_cap is not None:
            bend = np.tanh(logits / logits_soft_cap)
            logits, slope = logits_soft_cap * bend, 1 - bend**2
        logits = np.append(logits, [] if sinks is None else sinks[n])
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        shares = weights[: len(keys)]
        d_shares = values @ d_out[b, t, n].astype(float)
        mean = shares @ d_shares
        d_logits = shares * (d_shares - mean) * slope * softmax_scale
        d_query[b, t, n] = d_logits @ keys
        d_key[b, k, rows] += np.outer(d_logits, q)
        d_value[b, k, rows] += np.outer(shares, d_out[b, t, n])
        if d_sinks is not None:
            d_sinks[n] -= weights[-1] * mean
    return d_query, d_key, d_value, d_sinks
