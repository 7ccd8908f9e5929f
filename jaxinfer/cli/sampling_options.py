"""How tokens are chosen, as options: shared by every command that samples."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.sampling import Sampling


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Declares one option a field of `Sampling`."""
    group = parser.add_argument_group("sampling", "Without these the most likely token is taken every time.")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="of the K most likely tokens only")
    group.add_argument("--top-p", type=float, metavar="P", help="of the fewest tokens that have mass P")
    group.add_argument("--min-p", type=float, metavar="P", help="of tokens P times as likely as the best")
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1: against repeating")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Returns the sampling that the options ask for; ValueError names one outside its range."""
    from jaxinfer.sampling import Sampling

    return Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
