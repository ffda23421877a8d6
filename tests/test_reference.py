"""The float64 reference against oracles that share no code with it."""

import ast
import math
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from numba_mla import reference
from numba_mla.testing import inputs

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
NAN, INF = math.nan, math.inf


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def looped_attention(q, rows, num_visible, v_dim, scale):
    """One query, in plain Python floats: (out, lse)."""
    s = [scale * sum(a * b for a, b in zip(q, row, strict=True)) for row in rows[:num_visible]]
    if not s:
        return [0.0] * v_dim, -INF
    total = sum(math.exp(x) for x in s)
    out = [sum(math.exp(x) * row[d] for x, row in zip(s, rows, strict=False)) / total for d in range(v_dim)]
    return out, math.log(total)


def paged_rows(kv_cache, block_table, request, seq_len):
    block_size = kv_cache.shape[1]
    return [
        kv_cache[block_table[request, p // block_size], p % block_size].astype(float).tolist() for p in range(seq_len)
    ]


def torch_attention(q, k, v, scale, causal):
    """[t, h, d] float64 tensors -> out, lse; bottom-right aligned, every query sees a key."""
    s = scale * torch.einsum("thd,shd->hts", q, k)
    if causal:
        t, n = s.shape[1:]
        s = s.masked_fill(torch.ones(t, n).triu(n - t + 1).bool(), -INF)
    return torch.einsum("hts,shd->thd", s.softmax(-1), v).numpy(), s.logsumexp(-1).T.numpy()


# Attention


def test_reference_imports_numpy_and_ml_dtypes_alone():
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"numpy", "ml_dtypes"}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("num_heads", "kv_lora_rank", "qk_nope", "rope", "v_dim", "seq_lens", "new_tokens"),
    [
        (3, 16, 8, 4, 6, [9, 4, 21], [2, 4, 1]),
        (1, 5, 3, 0, 7, [6], [6]),
        (8, 32, 12, 8, 12, [33, 40], [0, 33]),
    ],
)
def test_absorbed_extend_is_attention_on_materialised_keys_and_values(
    rng, num_heads, kv_lora_rank, qk_nope, rope, v_dim, seq_lens, new_tokens, causal
):
    kv_b_proj = rng.standard_normal((num_heads * (qk_nope + v_dim), kv_lora_rank))
    kv_cache, block_table = inputs.paged_cache(rng, seq_lens, 4, kv_lora_rank + rope, np.float64, poison=NAN)
    q = rng.standard_normal((sum(new_tokens), num_heads, qk_nope + rope))
    starts = np.cumsum([0, *new_tokens])
    scale = 1 / math.sqrt(qk_nope + rope)

    w_uk, w_uv = reference.absorb_weights(kv_b_proj, num_heads, qk_nope, v_dim)
    q_latent = reference.bmm(q[..., :qk_nope].swapaxes(0, 1), w_uk).swapaxes(0, 1)
    out, lse = reference.extend(
        (q_latent, q[..., qk_nope:]),
        kv_cache,
        block_table,
        seq_lens,
        starts,
        scale=scale,
        kv_lora_rank=kv_lora_rank,
        causal=causal,
    )
    value = reference.bmm(out.swapaxes(0, 1), w_uv).swapaxes(0, 1)

    for request, seq_len in enumerate(seq_lens):
        rows = torch.tensor(paged_rows(kv_cache, block_table, request, seq_len), dtype=torch.float64)
        latent, k_pe = rows[:, :kv_lora_rank], rows[:, kv_lora_rank:]
        kv = (latent @ torch.tensor(kv_b_proj).T).view(seq_len, num_heads, qk_nope + v_dim)
        k = torch.cat([kv[..., :qk_nope], k_pe[:, None].expand(-1, num_heads, -1)], dim=-1)
        tokens = slice(starts[request], starts[request + 1])
        want, want_lse = torch_attention(torch.tensor(q[tokens]), k, kv[..., qk_nope:], scale, causal)
        np.testing.assert_allclose(value[tokens], want, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(lse[tokens], want_lse, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("poison", [NAN, INF, 3e38])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, E4M3])
def test_extend_is_a_python_loop_over_pages(rng, dtype, poison):
    seq_lens, new_tokens = [5, 0, 7, 3], [2, 0, 5, 1]
    problem = inputs.latent_problem(rng, 2, seq_lens, new_tokens, 3, 4, 3, dtype, q_dtype=BF16, poison=poison)
    cache_scale = 0.75 if dtype is E4M3 else None
    out, lse = reference.extend(**problem, cache_scale=cache_scale)
    assert out.dtype == lse.dtype == np.float64
    for request, seq_len in enumerate(seq_lens):
        rows = paged_rows(problem["kv_cache"], problem["block_table"], request, seq_len)
        rows = [[(cache_scale or 1) * x for x in row] for row in rows]
        start, stop = problem["query_start_loc"][request : request + 2]
        for token in range(start, stop):
            for head in range(2):
                q = problem["q"][token, head].astype(float).tolist()
                want = looped_attention(q, rows, seq_len - (stop - 1 - token), 4, problem["scale"])
                np.testing.assert_allclose(out[token, head], want[0], rtol=1e-12, atol=1e-13)
                np.testing.assert_allclose(lse[token, head], want[1], rtol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("query_lens", "kv_lens"), [([4, 1, 0, 6], None), ([3, 2], [5, 2]), ([1, 4], [9, 4])], ids=str)
def test_prefill_is_torch_attention(rng, query_lens, kv_lens, causal):
    problem = inputs.prefill_problem(rng, 3, query_lens, kv_lens, 10, 7)
    if kv_lens is None:
        del problem["kv_start_loc"]
    out, lse = reference.prefill(**problem, causal=causal)
    queries, keys = problem["query_start_loc"], problem.get("kv_start_loc", problem["query_start_loc"])
    for request, length in enumerate(query_lens):
        if length:
            tokens, rows = slice(*queries[request : request + 2]), slice(*keys[request : request + 2])
            q, k, v = (
                torch.tensor(problem[name].astype(float)[span])
                for name, span in [("q", tokens), ("k", rows), ("v", rows)]
            )
            want, want_lse = torch_attention(q, k, v, problem["scale"], causal)
            np.testing.assert_allclose(out[tokens], want, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(lse[tokens], want_lse, rtol=1e-12)


def test_prefill_of_five_queries_over_two_keys():
    q, k = np.zeros((5, 1, 2)), np.zeros((2, 1, 2))
    out, lse = reference.prefill(q, k, np.array([1.0, 5.0]).reshape(2, 1, 1), [0, 5], [0, 2], scale=1.0)
    assert out.ravel().tolist() == [0, 0, 0, 1, 3]
    assert lse.ravel().tolist() == [-INF, -INF, -INF, 0, math.log(2)]


def test_blocks_of_queries_change_nothing(rng, monkeypatch):
    problem = inputs.latent_problem(rng, 3, [40, 9], [17, 9], 4, 6, 2)
    whole = reference.extend(**problem)
    monkeypatch.setattr(reference, "SCORES_PER_BLOCK", 3 * 40 * 5)
    for one, other in zip(whole, reference.extend(**problem), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13)


def test_empty_requests_and_given_outputs(rng):
    problem = inputs.decode_problem(rng, 2, [5, 0, 7], 4, 6, 2, BF16)
    want, want_lse = reference.decode(**problem)
    out, lse = np.full((3, 2, 6), NAN, np.float32), np.full((3, 2), NAN, np.float32)
    got = reference.decode(**problem, out=out, lse=lse, isa="generic", validate=False)
    assert got[0] is out
    assert got[1] is lse
    assert not out[1].any()
    assert (lse[1] == -INF).all()
    np.testing.assert_array_equal(out, want.astype(np.float32))
    np.testing.assert_array_equal(lse, want_lse.astype(np.float32))


def test_an_empty_batch():
    cache = np.zeros((1, 4, 3), np.float32)
    table = np.zeros((0, 1), np.int32)
    out, lse = reference.decode(np.zeros((0, 2, 3)), cache, table, [], scale=1.0, kv_lora_rank=2)
    assert out.shape == (0, 2, 2)
    assert lse.shape == (0, 2)
    kv_c, k_pe, starts = reference.gather_cache(cache, table, [], kv_lora_rank=2)
    assert (kv_c.shape, k_pe.shape, starts.tolist()) == ((0, 2), (0, 1), [0])


def test_zero_queries_give_the_logarithm_of_the_number_of_keys(rng):
    problem = inputs.decode_problem(rng, 2, [8], 16, 6, 2)
    problem["q"][:] = 0
    np.testing.assert_allclose(reference.decode(**problem)[1], math.log(8), rtol=1e-15)


def test_without_a_table_page_b_is_request_b(rng):
    cache = rng.standard_normal((3, 4, 5))
    q, arguments = rng.standard_normal((3, 2, 5)), {"scale": 0.3, "kv_lora_rank": 3}
    with_table = reference.decode(q, cache, [[0], [1], [2]], [4, 1, 3], **arguments)
    without = reference.decode(q, cache, None, [4, 1, 3], **arguments)
    np.testing.assert_array_equal(with_table[0], without[0])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_reaches_only_the_lanes_that_see_it(rng, bad):
    problem = inputs.latent_problem(rng, 2, [20], [8], 4, 6, 2)
    clean_out, clean_lse = reference.extend(**problem)
    page, row = problem["block_table"][0, 19 // 4], 19 % 4
    problem["kv_cache"][page, row] = bad
    out, lse = reference.extend(**problem)
    np.testing.assert_allclose(out[:7], clean_out[:7], rtol=1e-13)
    np.testing.assert_allclose(lse[:7], clean_lse[:7], rtol=1e-13)
    assert np.isnan(out[7]).all()
    assert np.isnan(lse[7]).all()


def test_nan_in_a_query_reaches_its_own_lane(rng):
    problem = inputs.decode_problem(rng, 3, [6, 6], 4, 6, 2)
    problem["q"][1, 2, 0] = NAN
    out, lse = reference.decode(**problem)
    assert np.isnan(lse).nonzero() == (1, 2)
    assert np.isnan(out[1, 2]).all()
    assert np.isnan(out).sum() == 6


def test_nan_in_a_value_reaches_its_column_of_the_lanes_that_see_it(rng):
    problem = inputs.prefill_problem(rng, 2, [4], None, 6, 3)
    problem["v"][2, 1, 0] = NAN
    out, lse = reference.prefill(**problem)
    assert np.argwhere(np.isnan(out)).tolist() == [[2, 1, 0], [3, 1, 0]]
    assert np.isfinite(lse).all()


# Merging


def test_merging_halves_is_attending_to_all(rng):
    problem = inputs.prefill_problem(rng, 3, [5], [12], 6, 4)
    q, k, v, scale = (problem[name] for name in ("q", "k", "v", "scale"))
    whole = reference.prefill(q, k, v, [0, 5], [0, 12], scale=scale, causal=False)
    halves = [
        reference.prefill(q, k[rows], v[rows], [0, 5], [0, n], scale=scale, causal=False)
        for rows, n in [(slice(5), 5), (slice(5, 12), 7)]
    ]
    for got, want in zip(reference.merge_states(*halves[0], *halves[1]), whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("empty", [(0.0, -INF), (NAN, -INF), (NAN, INF), (3.0, INF)])
def test_merging_with_an_empty_side_is_exact(empty):
    x, empty_out = np.array([0.1, -7.3]), np.full(2, empty[0])
    for states in [(empty_out, empty[1], x, 1.5), (x, 1.5, empty_out, empty[1])]:
        out, lse = reference.merge_states(*states)
        assert (out.tolist(), lse.item()) == (x.tolist(), 1.5)
    out, lse = reference.merge_states(empty_out, empty[1], empty_out, empty[1])
    assert (out.tolist(), lse.item()) == ([0, 0], -INF)


def test_merging_a_state_with_itself_adds_ln_2_in_place():
    out, lse = np.array([[0.1, 3.0]]), np.array([-40.0])
    got = reference.merge_states(out, lse, out, lse, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert out.tolist() == [[0.1, 3.0]]
    assert lse.tolist() == [-40 + math.log(2)]


# The paged cache


def test_slots_of_minus_one_are_skipped_and_rows_past_the_slots_are_padding():
    cache = np.zeros((2, 4, 3), BF16)
    kv_c, k_pe = np.arange(1, 9, dtype=BF16).reshape(4, 2), np.full((4, 1, 1), 9, BF16)
    assert reference.write_cache(kv_c, k_pe, cache, [-1, 5, -1]) is None
    assert cache[1, 1].tolist() == [3, 4, 9]
    assert np.count_nonzero(cache) == 3
    reference.write_cache(kv_c, k_pe, cache, [-7, 0], pad_slot_id=-7)
    assert cache[0, 0].tolist() == [3, 4, 9]
    assert np.count_nonzero(cache) == 6


def test_fp8_stores_saturate_and_keep_nan():
    cache = np.zeros((1, 1, 4), E4M3)
    reference.write_cache(np.array([[1000, 465, -1000, NAN]], np.float32), np.zeros((1, 0)), cache, [0])
    assert cache[0, 0, :3].astype(float).tolist() == [448, 448, -448]
    assert np.isnan(cache[0, 0, 3].astype(float))
    wide = np.zeros((1, 1, 2), ml_dtypes.float8_e5m2)
    reference.write_cache(np.array([[1e9, -INF]], np.float32), np.zeros((1, 0)), wide, [0])
    assert wide.astype(float).ravel().tolist() == [57344, -57344]


def test_cache_scale_divides_what_is_stored_and_multiplies_what_is_read():
    cache = np.zeros((1, 1, 2), E4M3)
    reference.write_cache(np.full((1, 1), 3, BF16), np.full((1, 1), -1, BF16), cache, [0], cache_scale=0.5)
    assert cache.astype(float).ravel().tolist() == [6, -2]
    kv_c, k_pe, _ = reference.gather_cache(cache, [[0]], [1], kv_lora_rank=1, cache_scale=0.5)
    assert (kv_c.item(), k_pe.item()) == (3, -1)


def test_the_656_byte_row(rng):
    kv_c, k_pe = inputs.normal(rng, (3, 512), BF16), inputs.normal(rng, (3, 1, 64), BF16)
    kv_c[0, :128] = 0
    kv_c[1, 128:256] *= BF16(1024)
    kv_c[2, 0], kv_c[2, 1] = NAN, INF
    cache = np.full((2, 2, 656), 255, np.uint8)
    reference.write_cache(kv_c, k_pe, cache, [3, 0, 1])
    assert (cache[1, 0] == 255).all()

    row = cache[0, 0]
    scales = np.frombuffer(row[512:528].tobytes(), np.float32)
    largest = abs(kv_c[1].astype(np.float32)).reshape(4, 128).max(axis=1)
    np.testing.assert_array_equal(scales, largest / np.float32(448))
    assert row[528:].tobytes() == k_pe[1].tobytes()

    got_c, got_pe, _ = reference.gather_cache(cache, [[1], [0]], [2, 2], starts=[1, 0])
    np.testing.assert_array_equal(got_pe, k_pe[:, 0].astype(float))
    want = kv_c.astype(float)
    assert not got_c[0, :128].any()
    assert np.isnan(got_c[2, 0])
    assert 0 < got_c[2, 1] == np.nanmax(got_c[2, :128])
    assert (got_c == got_c.astype(BF16).astype(float))[~np.isnan(got_c)].all()
    # e4m3 keeps 4 bits: half a unit is 1/16 of a normal value; its subnormals are 2^-9 of the scale apart. A product
    # with the scale is rounded to bfloat16.
    grouped = want.reshape(3, 4, 128)
    largest = abs(grouped).max(axis=-1, keepdims=True, where=np.isfinite(grouped), initial=0)
    bound = np.maximum(abs(grouped) / 16, largest / 448 / 1024) * (1 + 1e-6) + abs(got_c.reshape(3, 4, 128)) / 256
    assert ((abs(got_c.reshape(3, 4, 128) - grouped) <= bound) | ~np.isfinite(grouped)).all()

    arguments = {"scale": 0.05, "kv_lora_rank": 512}
    q = rng.standard_normal((1, 2, 576))
    dense = np.concatenate([got_c, got_pe], axis=-1)[None, 1:]
    direct = reference.decode(q, cache, [[0]], [1], **arguments)
    np.testing.assert_array_equal(direct[0], reference.decode(q, dense, [[0]], [1], **arguments)[0])


def test_no_tokens_are_written_to_any_layout():
    for cache in (np.zeros((1, 1, 576), BF16), np.zeros((1, 1, 576), E4M3), np.zeros((1, 1, 656), np.uint8)):
        reference.write_cache(np.zeros((0, 512), BF16), np.zeros((0, 64), BF16), cache, [])
        assert not cache.view(np.uint8).any()


def test_gather_reads_back_what_was_written(rng):
    cache, table = inputs.paged_cache(rng, [9, 0, 4], 4, 5, BF16, poison=NAN)
    out = np.zeros((9, 3), BF16), np.zeros((9, 2), BF16)
    kv_c, k_pe, starts = reference.gather_cache(cache, table, [9, 0, 4], starts=[3, 0, 1], kv_lora_rank=3, out=out)
    assert kv_c is out[0]
    assert k_pe is out[1]
    assert starts.tolist() == [0, 6, 6, 9]
    rows = paged_rows(cache, table, 0, 9)[3:] + paged_rows(cache, table, 2, 4)[1:]
    np.testing.assert_array_equal(np.concatenate([kv_c, k_pe], axis=1).astype(float), rows)


def test_expanding_a_block_table():
    table = np.array([[2, 0], [1, -1]], np.int32)
    slots = reference.expand_block_table(table, 3)
    assert slots.dtype == np.int32
    assert slots.tolist() == [[6, 7, 8, 0, 1, 2], [3, 4, 5, -1, -1, -1]]
    assert reference.expand_block_table(table[:0], 3).shape == (0, 6)


# Weights and rotary embedding


def test_bmm_is_einsum(rng):
    a, w = inputs.normal(rng, (3, 4, 5), BF16), inputs.normal(rng, (3, 6, 5), BF16)
    want = np.einsum("hmk,hnk->hmn", a.astype(float), w.astype(float))
    np.testing.assert_allclose(reference.bmm(a, w, scale=0.5), want / 2, rtol=1e-13, atol=1e-15)
    out = np.zeros((3, 4, 6), np.float32)
    assert reference.bmm(a, reference.pack_weight(w, scale=2.0, isa="generic"), out=out) is out
    np.testing.assert_array_equal(out, (2 * want).astype(np.float32))


def test_block_scales_of_ragged_blocks(rng):
    w = inputs.normal(rng, (2, 200, 130), E4M3)
    scale = rng.uniform(0.5, 2, (2, 2, 2)).astype(np.float32)
    got = reference.pack_weight(w, scale=scale, block_size=(128, 128))
    for h, n, k in [(0, 100, 0), (1, 127, 127), (0, 128, 127), (1, 199, 129)]:
        assert got[h, n, k] == float(w[h, n, k]) * float(scale[h, n // 128, k // 128])


def test_requantising_block_scales_to_one(rng):
    w = inputs.normal(rng, (200, 130), E4M3)
    scale = rng.uniform(0.5, 2, (2, 2)).astype(np.float32)
    got, d = reference.block_quant_to_tensor_quant(w, scale, (128, 128))
    assert (got.dtype, d.dtype) == (E4M3, np.float32)
    x = torch.tensor(w.astype(np.float32)) * torch.tensor(scale[np.arange(200) // 128][:, np.arange(130) // 128])
    want = (x * (torch.tensor(448.0) / x.abs().max())).clamp(-448, 448).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(torch.uint8).numpy())
    assert d == (x.abs().max() / 448).item()
    zeros, d = reference.block_quant_to_tensor_quant(np.zeros((3, 3), E4M3), np.ones((1, 1)), (128, 128))
    assert not zeros.astype(float).any()
    assert d == np.float32(1e-12) / np.float32(448)


def test_num_kv_splits_is_a_capped_power_of_two():
    for length in range(0, 20000, 37):
        splits = reference.num_kv_splits(length, 2**20)
        assert splits >= max(1, length // 512) > splits // 2
    assert reference.num_kv_splits(10**6, 3) == 6


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_is_multiplication_by_a_complex_phase(rng, interleaved):
    x, positions, inv_freq = rng.standard_normal((3, 2, 8)), np.array([0, 5, 1000]), 10.0 ** -np.arange(4)
    got = reference.apply_rope(x, positions, inv_freq=inv_freq, interleaved=interleaved, scaling=1.5)
    for t in range(3):
        for i in range(4):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
            want = (x[t, :, a] + 1j * x[t, :, b]) * 1.5 * np.exp(1j * positions[t] * inv_freq[i])
            np.testing.assert_allclose(got[t, :, a] + 1j * got[t, :, b], want, rtol=1e-12, atol=1e-12)
    one_head = reference.apply_rope(x[:, 1], positions, inv_freq=inv_freq, interleaved=interleaved, scaling=1.5)
    np.testing.assert_array_equal(one_head, got[:, 1])
