"""Random histories of the cache manager against a plain model: a list of tokens per request."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from numba_mla.cache import CacheFullError, PagedLatentCache
from numba_mla.config import MLAConfig

CONFIG = MLAConfig(
    hidden_size=8,
    num_heads=1,
    q_lora_rank=None,
    kv_lora_rank=2,
    qk_nope_head_dim=2,
    qk_rope_head_dim=0,
    v_head_dim=2,
)
# Equal first pages, and equal second pages after different first ones.
PROMPTS = st.sampled_from(
    [
        list(range(1, 10)),
        [11, 12, 13, 14, 5, 6, 7, 8, 9],
        [1, 2, 3, 4, 5, 60, 70],
        [1, 2, 30, 40],
        list(range(1, 6)),
        [],
    ]
)
INDEX = st.integers(0, 9)
NUM_LAYERS = 2


def has_requests(machine):
    return bool(machine.tokens)


class CacheMachine(RuleBasedStateMachine):
    """The model keeps, for each request, its tokens and what is left of its prompt.

    Tokens are numbers that stand in their rows in both layers. After a prompt come numbers that no prompt
    has and no two requests share, so that a row of another request is never taken for the right one.
    """

    @initialize(num_blocks=st.integers(1, 10), block_size=st.integers(1, 4))
    def start(self, num_blocks, block_size):
        self.cache = PagedLatentCache(CONFIG, num_blocks, block_size, num_layers=NUM_LAYERS, dtype=np.float32)
        self.tokens, self.prompt_left = {}, {}
        self.committed = set()  # beginnings of prompts, as tuples of tokens
        self.stale, self.names_used, self.next_token = [], 0, 1000

    def pick(self, index):
        """One of the live requests."""
        return list(self.tokens)[index % len(self.tokens)]

    @rule(prompt=PROMPTS)
    def add(self, prompt):
        self.names_used += 1
        name = self.names_used
        cached = self.cache.add(name, prompt)
        assert cached % self.cache.block_size == 0
        assert cached == 0 or cached < len(prompt)
        # Nothing is reused that was not committed.
        assert cached == 0 or tuple(prompt[:cached]) in self.committed
        self.tokens[name], self.prompt_left[name] = prompt[:cached], prompt[cached:]

    @rule(prompt=PROMPTS)
    def serve(self, prompt):
        self.add(prompt)
        self.step([-1], len(prompt) - self.cache.seq_len(self.names_used), commits=True)

    @precondition(has_requests)
    @rule(index=INDEX)
    def fork(self, index):
        source = self.pick(index)
        self.names_used += 1
        self.cache.fork(source, self.names_used)
        self.tokens[self.names_used], self.prompt_left[self.names_used] = self.tokens[source][:], []

    @precondition(has_requests)
    @rule(index=INDEX, count=st.integers(1, 5))
    def branch(self, index, count):
        source = index % len(self.tokens)
        self.fork(source)
        self.step([source, len(self.tokens) - 1], count, commits=True)

    @precondition(has_requests)
    @rule(index=INDEX, dropped=st.integers(0, 5))
    def truncate(self, index, dropped):
        name = self.pick(index)
        kept = max(len(self.tokens[name]) - dropped, 0)
        before = self.cache.append({name: 0})
        self.cache.truncate(name, kept)
        if kept < len(self.tokens[name]):
            self.prompt_left[name] = []
            self.stale.append(before)
        self.tokens[name] = self.tokens[name][:kept]

    @precondition(has_requests)
    @rule(index=INDEX, dropped=st.integers(0, 5), count=st.integers(1, 6))
    def rewrite(self, index, dropped, count):
        """As when speculative tokens are rejected and others take their place."""
        self.truncate(index, dropped)
        self.step([index], count, commits=True)

    @precondition(has_requests)
    @rule(index=INDEX)
    def free(self, index):
        name = self.pick(index)
        self.stale.append(self.cache.append({name: 0}))
        self.cache.free(name)
        del self.tokens[name], self.prompt_left[name]

    @precondition(has_requests)
    @rule(indices=st.lists(INDEX, max_size=4), count=st.integers(0, 6), commits=st.booleans())
    def step(self, indices, count, commits):
        counts = {self.pick(index): max(count - order, 0) for order, index in enumerate(indices)}
        before = self.bookkeeping()
        try:
            batch = self.cache.append(counts)
        except CacheFullError:
            assert self.bookkeeping() == before
            assert self.pages_needed(counts) > self.cache.num_free_blocks
            return
        self.cache.check_batch(batch)
        page, row = np.divmod(batch.slot_mapping, self.cache.block_size)
        self.cache.data[:, page, row] = np.array(self.take_tokens(counts), np.float32)[:, None]
        if commits:
            self.cache.commit(batch)
            self.note_committed(counts)

    @rule(storage_is_file=st.booleans())
    def save_and_load(self, storage_is_file):
        if self.tokens:
            self.stale.append(self.cache.append(dict.fromkeys(self.tokens, 0)))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved"
            self.cache.save(path)
            before = self.bookkeeping()
            self.cache = PagedLatentCache.load(path, storage=Path(folder) / "rows" if storage_is_file else None)
            assert self.bookkeeping() == before
            assert [path.name for path in Path(folder).glob("*saved*")] == ["saved"]

    @invariant()
    def rows_are_the_model_s_tokens(self):
        batch = self.cache.append(dict.fromkeys(self.tokens, 0))
        assert self.cache.request_ids == tuple(self.tokens)
        for table, seq_len, expected in zip(batch.block_table, batch.seq_lens, self.tokens.values(), strict=True):
            assert seq_len == len(expected)
            pages = table[table >= 0]
            for layer in range(NUM_LAYERS):
                rows = self.cache.data[layer, pages].reshape(-1, 2)[:seq_len]
                assert rows.tolist() == [[token, token] for token in expected]

    @invariant()
    def pages_are_shared_only_where_contents_agree_and_the_rest_is_free(self):
        batch = self.cache.append(dict.fromkeys(self.tokens, 0))
        size, holders = self.cache.block_size, {}
        for table, tokens in zip(batch.block_table.tolist(), self.tokens.values(), strict=True):
            pages = [page for page in table if page >= 0]
            assert len(pages) == len(set(pages)) == -(-len(tokens) // size)
            for index, page in enumerate(pages):
                holders.setdefault(page, []).append(tokens[: (index + 1) * size])
        assert self.cache.num_free_blocks == self.cache.num_blocks - len(holders)
        for contents in holders.values():
            longest = max(contents, key=len)
            # Two may stand at different rows of a page only while one is cut back or has yet to write.
            assert all(tokens == longest[: len(tokens)] for tokens in contents)

    @invariant()
    def stale_batches_are_refused(self):
        for batch in self.stale:
            for use in (self.cache.check_batch, self.cache.commit):
                with pytest.raises(ValueError, match=r"batch: request .* has been freed, truncated or added again"):
                    use(batch)

    def take_tokens(self, counts):
        """Extend the model by a step and return the step's tokens."""
        step = []
        for name, count in counts.items():
            known = self.prompt_left[name][:count]
            fresh = list(range(self.next_token, self.next_token + count - len(known)))
            self.next_token += len(fresh)
            self.prompt_left[name] = self.prompt_left[name][count:]
            self.tokens[name] = self.tokens[name] + known + fresh
            step += known + fresh
        return step

    def note_committed(self, counts):
        size = self.cache.block_size
        for name in counts:
            tokens = self.tokens[name]
            self.committed |= {tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)}

    def pages_needed(self, counts):
        """As if every request that writes to a page with other holders had to copy it: enough, if not all needed."""
        size, batch = self.cache.block_size, self.cache.append(dict.fromkeys(self.tokens, 0))
        all_pages = batch.block_table[batch.block_table >= 0].tolist()
        needed = 0
        for name, count in counts.items():
            length = len(self.tokens[name])
            needed += -(-(length + count) // size) - -(-length // size)
            row = batch.block_table[batch.request_ids.index(name)]
            if count and length % size:
                needed += all_pages.count(row[length // size]) > 1
        return needed

    def bookkeeping(self):
        """What no refusal and no saving may change."""
        pool = self.cache._pool
        requests = {name: request.saved() for name, request in self.cache._requests.items()}
        return requests, pool.free_pages, pool.keys


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
