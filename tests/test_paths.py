"""Absorbed and materialised attention are two ways to compute the same, on the same cached latents."""

import numpy as np
import pytest

import numba_mla

HEADS, NOPE, ROPE, VALUE, RANK = 3, 24, 16, 20, 64
SCALE = (NOPE + ROPE) ** -0.5


@pytest.mark.parametrize(
    ("prefix", "num_new"), [(1500, 4), (0, 130), (700, 60)], ids=["speculative", "fresh prompt", "chunk"]
)
def test_absorbed_and_materialised_agree(isa, rng, prefix, num_new):
    """A speculative batch of 4 tokens over a long prefix, a fresh long prompt, a chunk: both paths agree."""
    seq_len = prefix + num_new
    kv_b_proj = (rng.standard_normal((HEADS * (NOPE + VALUE), RANK)) / 8).astype(np.float32)
    cache = rng.standard_normal((40, 64, RANK + ROPE), dtype=np.float32)
    table = rng.permutation(40)[None, : -(-seq_len // 64)]
    q = rng.standard_normal((num_new, HEADS, NOPE + ROPE), dtype=np.float32)
    starts = [0, num_new]

    w_uk, w_uv = (numba_mla.pack_weight(w) for w in numba_mla.absorb_weights(kv_b_proj, HEADS, NOPE, VALUE))
    q_latent = numba_mla.bmm(q[..., :NOPE].swapaxes(0, 1), w_uk).swapaxes(0, 1)
    latent, lse = numba_mla.extend((q_latent, q[..., NOPE:].copy()), cache, table, [seq_len], starts, scale=SCALE,
                                   kv_lora_rank=RANK)  # fmt: skip
    absorbed = numba_mla.bmm(latent.swapaxes(0, 1), w_uv).swapaxes(0, 1)

    kv_c, k_pe, kv_starts = numba_mla.gather_cache(cache, table, [seq_len], kv_lora_rank=RANK)
    kv = numba_mla.bmm(kv_c[None], numba_mla.pack_weight(kv_b_proj[None]))[0].reshape(seq_len, HEADS, NOPE + VALUE)
    k = np.concatenate([kv[..., :NOPE], np.broadcast_to(k_pe[:, None], (seq_len, HEADS, ROPE))], axis=2)
    out, dense_lse = numba_mla.prefill(q, k, kv[..., NOPE:], starts, kv_starts, scale=SCALE)
    # Both are float32 with sums of up to 1504 terms; the differences are those of the order of the products.
    np.testing.assert_allclose(absorbed, out, rtol=0, atol=2e-5 * abs(out).max())
    np.testing.assert_allclose(lse, dense_lse, rtol=0, atol=2e-5)
