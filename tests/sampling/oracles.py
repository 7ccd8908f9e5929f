"""Sampling in plain numpy: one row, one sort, float64; written from the rules, not from the library."""

import numpy as np


def penalise(logits, penalty, seen):
    """float32 [V]: positive logits of seen tokens divided, the others multiplied."""
    penalty = np.float32(penalty)
    with np.errstate(over="ignore"):
        return np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def ranked(logits):
    """Ids by logit descending, equal logits by id."""
    return np.lexsort((np.arange(logits.size), -logits))


def softmax(logits):
    weights = np.exp(np.float64(logits) - np.float64(logits.max()))
    return weights / weights.sum()


def log_softmax(logits):
    shifted = np.float64(logits) - np.float64(logits.max())
    return shifted - np.log(np.exp(shifted).sum())


def kept(logits, *, temperature, top_k=None, top_p=None, min_p=None, tolerance=0.0):
    """Ids that may be drawn, best first; `tolerance` lowers top_p and min_p."""
    with np.errstate(over="ignore"):
        scaled = (np.float64(logits) - np.float64(logits.max())) / np.float64(np.float32(temperature))
    order = ranked(logits)[:top_k]
    weights = np.exp(scaled[order])
    if top_p is not None and top_p < 1:
        mass = np.cumsum(weights) / weights.sum()
        reached = mass >= np.float64(np.float32(top_p)) - tolerance
        order = order[: np.argmax(reached) + 1 if reached.any() else order.size]
    if min_p is not None:
        likely = np.exp(scaled[order]) >= np.float64(np.float32(min_p)) * (1 - tolerance)
        order = order[likely]
    return order


def probabilities(logits, ids, temperature):
    """float64 [len(ids)], the distribution over `ids` alone."""
    with np.errstate(over="ignore"):
        weights = np.exp((np.float64(logits[ids]) - np.float64(logits.max())) / np.float64(temperature))
    return weights / weights.sum()
