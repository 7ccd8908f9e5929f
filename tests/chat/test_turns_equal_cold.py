"""Whatever turns do to a conversation, the answer is that of a cold refill, and reuse happens where it may.

Sequences of turns run against the slot store: append, edit anywhere, undo, shorten, repeat, another slot, a
turn that is cancelled, another window policy, save and load. After each one

- its tokens and log-probabilities are those of one forward over the whole prompt without any cache;
- its planned mode and kept length are those of an independent model of the rules;
- the slot holds exactly the tokens it says.

Shapes are few on purpose (one chunk size, a small capacity): compiling is most of what this costs.
"""

import collections
import dataclasses
import functools
import importlib.util
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import jaxinfer as ji
import jaxinfer.chat.turn
from jaxinfer.chat.saved_files import read_record
from jaxinfer.chat.saved_session import read_slot, write_session
from jaxinfer.chat.turn import Seat, run_turn
from jaxinfer.generation.rows import Options
from jaxinfer.testing import tiny_config, tiny_model
from tests.prefix.oracles import best_boundary

CAPACITY, CHUNK = 64, 16
TOLERANCE = {"llama": 1e-4, "gemma3": 1e-4, "qwen3_5": 1e-3}
NUM_TOP = 8
OFF, ON = ji.KvWindowPolicy.off(), ji.KvWindowPolicy.on()
MODELS = {family: tiny_model(family, seed=5, layers=tiny_config(family).layers[-2:]) for family in TOLERANCE}

# How often each kind of turn is drawn; a save and load takes as long as a dozen others.
WEIGHTS = {
    "append": 10,
    "edit": 10,
    "undo": 5,
    "shorten": 5,
    "repeat": 3,
    "switch": 5,
    "cancel": 4,
    "policy": 2,
    "reload": 1 if importlib.util.find_spec("orbax") else 0,
}
KINDS = [kind for kind, weight in WEIGHTS.items() for _ in range(weight)]


@dataclasses.dataclass
class Tally:
    """What the sequences of one test did."""

    sequences: int = 0
    steps: int = 0
    excused: int = 0
    worst: float = 0.0
    modes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    kinds: collections.Counter = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step: its kind, new tokens, a place in the history in thousandths, the length of the answer."""

    kind: str
    tokens: list[int]
    place: int
    num_new: int


EACH_KIND = [Turn(kind, [7, 8, 9], 701, 3) for kind in dict.fromkeys(KINDS)]
turns = st.builds(
    Turn,
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 200), min_size=1, max_size=12),
    st.integers(0, 1000),
    st.integers(1, 4),
)


class Cancelled(Exception):
    pass


class Conversations:
    """Two slots of one store, and what must be true of them after every turn."""

    def __init__(self, family, policy, tally, directory):
        self.family, self.tally, self.directory = family, tally, directory
        self.model = dataclasses.replace(self.models()[family], kv_window=policy)
        self.store, self.slot = ji.PrefixStore(10**9), 0
        # Of each slot: the tokens represented after each of its turns, and the last prompt.
        self.histories = {0: [[1, 2, 3]], 1: [[4, 5]]}
        self.prompts = {0: [1, 2, 3], 1: [4, 5]}

    def models(self):
        return MODELS

    def take(self, turn):
        self.tally.kinds[turn.kind] += 1
        if turn.kind == "switch":
            self.slot = turn.place % 2
        if turn.kind == "policy":
            policy = OFF if self.model.kv_window.enabled else ON
            self.model = dataclasses.replace(self.model, kv_window=policy)
        if turn.kind == "reload":
            self._reload()
        prompt = self._whole(self._prompt(turn)[: CAPACITY - turn.num_new])
        if turn.kind == "cancel":
            self._cancel(prompt, turn)
            return
        mode, kept, shared = self._expected_plan(prompt)
        result = self._run(prompt, turn, checkpoint_at=(max(1, len(prompt) // 2),))
        plan = result.plan
        assert (plan.mode.name, plan.reusable_len) == (mode, kept)
        if shared and not self._needs_checkpoints():  # nothing but the tokens limits what is kept
            assert plan.reusable_len == min(shared, len(prompt) - 1)
        self.tally.modes[mode] += 1
        self._compare(prompt, result.generation)
        represented = [*prompt, *result.fed_ids]
        self.prompts[self.slot] = prompt
        self.histories[self.slot].append(represented)
        self._check_entry(self.store.slots[self.slot].entry, represented)

    def _prompt(self, turn):
        history = self.histories[self.slot]
        if turn.kind == "undo" and len(history) > 1:
            history.pop()
        last = history[-1]
        if turn.kind in ("append", "undo", "cancel", "reload"):
            return [*last, *self._columns(turn)]
        at = turn.place * len(last) // 1000
        if turn.kind == "edit":
            return [*self._whole(last[:at]), *self._columns(turn)]
        if turn.kind == "shorten":
            return last[: max(1, at)]
        return self.prompts[self.slot]

    def _columns(self, turn):
        """What a turn adds."""
        return turn.tokens

    def _whole(self, columns):
        """The columns without what was cut at their end."""
        return columns

    def _run(self, prompt, turn, **options):
        return run_turn(self._seat(), prompt, self._options(prompt, turn), **options)

    def _check_entry(self, entry, represented):
        assert list(entry.token_ids) == represented

    def _seat(self):
        return Seat(self.store, self.slot, self.model, CAPACITY, 3)

    def _options(self, prompt, turn):
        return Options.checked(self.model, [prompt], turn.num_new, logprobs=NUM_TOP)

    def _needs_checkpoints(self):
        return self.model.config.is_recurrent or (self.model.kv_window.enabled and self.family == "gemma3")

    def _cancel(self, prompt, turn):
        before = dict(self.store.slots)
        chunks = []

        def cancel(chunk):
            chunks.append(chunk)
            if len(chunks) > turn.place % 2 or chunk.finish_reason is not None:
                raise Cancelled

        with pytest.raises(Cancelled):
            self._run(prompt, turn, stream=cancel)
        assert dict(self.store.slots) == before
        for slot in before.values():
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(slot.state))

    def _reload(self):
        write_session(self.directory, self._seat(), (), ())
        self.store.drop(self.slot)
        loaded = read_slot(self.directory, read_record(self.directory), self._seat())
        if loaded is not None:
            self.store.put(self.slot, loaded)

    def _expected_plan(self, prompt):
        """Returns the mode, the length kept and the shared length that the rules ask for."""
        held = self.store.slots.get(self.slot)
        if held is None or held.entry.metadata.kv_window != self.model.kv_window:
            return "FULL_REFILL", 0, 0
        return best_boundary(
            list(held.entry.token_ids),
            list(held.entry.content),
            *self._described(prompt),
            checkpoints=list(held.ring.lengths),
            recurrent_len=None,
            floor=self._floor(held),
            whole_runs=self.model.config.is_bidirectional,
        )

    def _described(self, prompt):
        """The prompt's token ids and its images."""
        return prompt, []

    def _floor(self, held):
        """The truncation floor from the meaning of rows: base + window - 1 once something was evicted; none
        where a layer is recurrent."""
        if self.model.config.is_recurrent:
            return None
        floor = 0
        for layer, config in zip(held.state.layers, self.model.config.layers, strict=True):
            base = int(np.asarray(getattr(layer, "base", np.zeros(1)))[0])
            floor = max(floor, base + config.window - 1 if base else 0)
        return floor

    def _cold(self, columns):
        return cold_logprobs(self.family, columns)

    def _compare(self, prompt, generation):
        cold = self._cold((*prompt, *generation.token_ids))
        assert len(generation.logprobs) == len(generation.token_ids)
        for step, got in enumerate(generation.logprobs, len(prompt) - 1):
            want = cold[step]
            for token, logprob in (*got.top, (got.token_id, got.logprob)):
                self.tally.worst = max(self.tally.worst, abs(logprob - float(want[token])))
            assert self.tally.worst < TOLERANCE.get(self.family, 1e-4)
            self.tally.steps += 1
            if got.token_id != int(want.argmax()):
                second, first = np.sort(want)[-2:]
                assert first - second < 10 * TOLERANCE.get(self.family, 1e-4)
                self.tally.excused += 1  # a tie within rounding


@functools.partial(jax.jit, static_argnames=("config",))
def forward_alone(params, tokens, *, config):
    logits, _ = ji.forward(params, tokens, config=config, logits="all")
    return jax.nn.log_softmax(logits[0])


@functools.cache  # both policies ask for much the same
def cold_logprobs(family, ids):
    """Log-probabilities [CAPACITY, V] after each of `ids`, from nothing and without a cache."""
    tokens = np.zeros((1, CAPACITY), np.int32)
    tokens[0, : len(ids)] = ids
    model = MODELS[family]
    return np.asarray(forward_alone(model.params, tokens, config=model.config))


def run_sequences(family, policy, count, directory, kind=Conversations, first=EACH_KIND):
    """Runs `count` sequences of turns of a kind of conversations and returns what they did."""
    tally = Tally()

    @settings(
        max_examples=count - 1,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.lists(turns, min_size=3, max_size=8))
    @example(first)
    def sequence(steps):
        tally.sequences += 1
        conversations = kind(family, policy, tally, directory)
        conversations.take(Turn("repeat", [], 0, 3))
        for step in steps:
            conversations.take(step)

    in_chunks = {
        name: functools.partial(getattr(jaxinfer.chat.turn, name), max_chunk=CHUNK)
        for name in ("prefill", "prefill_chunks")
    }
    with jax.default_matmul_precision("highest"), mock.patch.multiple(jaxinfer.chat.turn, **in_chunks):
        sequence()
    share = tally.excused / tally.steps
    print(f"{family} {'on' if policy.enabled else 'off'}: excused {share:.4%}; {tally}")
    assert share <= 0.01
    assert tally.sequences == count
    assert set(tally.kinds) == set(KINDS)
    assert tally.modes["FULL_REFILL"] > 0
    assert tally.modes["EXACT_APPEND"] > 0
    return tally


def check_modes(tally, *, truncates, replays):
    assert (tally.modes["TRUNCATE_APPEND"] > 0) == truncates
    assert not replays or tally.modes["REPLAY_FROM_CHECKPOINT"] > 0


@pytest.mark.parametrize("policy", [OFF, ON], ids=["keep", "evict"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_turn_equals_a_cold_refill(family, policy, tmp_path):
    tally = run_sequences(family, policy, 50, tmp_path / "saved")
    check_modes(tally, truncates=True, replays=family == "gemma3" and policy.enabled)


def test_every_turn_of_a_hybrid_equals_a_cold_refill(tmp_path):
    check_modes(run_sequences("qwen3_5", OFF, 20, tmp_path / "saved"), truncates=False, replays=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [OFF, ON], ids=["keep", "evict"])
@pytest.mark.parametrize("family", TOLERANCE)
def test_every_turn_equals_a_cold_refill_at_length(family, policy, tmp_path):
    tally = run_sequences(family, policy, 500, tmp_path / "saved")
    replays = family == "qwen3_5" or (family == "gemma3" and policy.enabled)
    check_modes(tally, truncates=family != "qwen3_5", replays=replays)


@pytest.mark.parametrize("family", TOLERANCE)
def test_toy_logits_spread_enough_to_tell_tokens_apart(family):
    model = MODELS[family]
    logits, _ = ji.forward(model.params, np.arange(40)[None], config=model.config, logits="all")
    assert float(np.std(logits)) >= 1
