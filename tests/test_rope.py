"""Rotary embedding: frequencies against transformers, the rotation against float64."""

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from numba_mla import reference
from numba_mla.config import MLAConfig
from numba_mla.rope import apply_rope, inverse_frequencies, rotation_scaling

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
ROPE_VALUES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": YARN,
    "yarn-mscales-equal": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn-mscales-differ": YARN | {"mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn-attention-factor": YARN | {"attention_factor": 1.25},
    "yarn-betas": YARN | {"beta_fast": 8, "beta_slow": 2},
    "yarn-untruncated": YARN | {"truncate": False},
    "yarn-no-ramp": YARN | {"beta_fast": 4, "beta_slow": 4, "truncate": False},
    "yarn-factor-below-one": YARN | {"factor": 0.5},
}


def rope_inputs(num_tokens, width, num_heads=None, seed=0):
    generator = np.random.default_rng(seed)
    shape = (num_tokens, width) if num_heads is None else (num_tokens, num_heads, width)
    x = generator.standard_normal(shape).astype(np.float32)
    positions = generator.integers(0, 163840, num_tokens)
    return x, positions, 10000.0 ** -(np.arange(0, width, 2) / width)


@pytest.mark.parametrize("name", ROPE_VALUES)
@pytest.mark.parametrize(("width", "theta"), [(64, 10000.0), (8, 500.0)])
def test_frequencies_and_scaling_are_those_of_transformers(name, width, theta):
    values = ROPE_VALUES[name] | {"rope_theta": theta}
    hf_config = DeepseekV3Config(qk_rope_head_dim=width, max_position_embeddings=163840, rope_parameters=dict(values))
    expected = DeepseekV3RotaryEmbedding(hf_config)
    config = MLAConfig.from_dict(hf_config.to_dict())

    inv_freq = inverse_frequencies(width, config.rope_theta, config.rope_scaling)

    assert inv_freq.dtype == np.float64
    np.testing.assert_allclose(inv_freq, expected.inv_freq.numpy(), rtol=1e-6)
    assert rotation_scaling(config.rope_scaling) == pytest.approx(expected.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_heads", [None, 1, 3])
@pytest.mark.parametrize("width", [2, 6, 64])
def test_rotation_is_right_at_any_position(width, num_heads, interleaved):
    x, positions, inv_freq = rope_inputs(50, width, num_heads)
    ours = apply_rope(x, positions, inv_freq=inv_freq, interleaved=interleaved, scaling=1.3)
    exact = reference.apply_rope(x, positions, inv_freq=inv_freq, interleaved=interleaved, scaling=1.3)
    assert ours.dtype == np.float32
    # Two products, a sum, and the rounding of cos and sin: under four float32 roundings of |a| + |b|.
    np.testing.assert_allclose(ours, exact, rtol=0, atol=4 * 2**-24 * 1.3 * 2 * abs(x).max())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    x, positions, inv_freq = rope_inputs(50, 64, 2)
    x = x.astype(dtype)
    ours = apply_rope(x, positions, inv_freq=inv_freq, interleaved=True)
    exact = reference.apply_rope(x, positions, inv_freq=inv_freq, interleaved=True)
    assert ours.dtype == dtype
    half_ulp = float(ml_dtypes.finfo(dtype).eps) / 2
    np.testing.assert_allclose(ours.astype(np.float64), exact, rtol=half_ulp, atol=1e-6)


def test_far_positions_are_nearer_to_exact_than_float32_angles():
    x, _, inv_freq = rope_inputs(1, 64)
    position = np.array([163839])
    exact = reference.apply_rope(x, position, inv_freq=inv_freq, interleaved=False)
    angles = torch.from_numpy(position).float()[:, None] * torch.from_numpy(inv_freq).float()
    a, b = torch.from_numpy(x).chunk(2, dim=-1)
    with_float32_angles = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
    ours = apply_rope(x, position, inv_freq=inv_freq, interleaved=False)
    assert abs(ours - exact).max() < 1e-6
    assert abs(with_float32_angles.numpy() - exact).max() > 1e-4


def test_pair_orders_are_permutations_of_each_other_and_differ():
    x, positions, inv_freq = rope_inputs(7, 8)
    order = np.concatenate([np.arange(0, 8, 2), np.arange(1, 8, 2)])
    interleaved = apply_rope(x, positions, inv_freq=inv_freq, interleaved=True)
    half_split = apply_rope(x[:, order], positions, inv_freq=inv_freq, interleaved=False)
    assert np.array_equal(half_split, interleaved[:, order])
    wrong = apply_rope(x, positions, inv_freq=inv_freq, interleaved=False)
    assert abs(wrong - interleaved).max() > 0.1


def test_input_is_left_alone_and_position_zero_changes_nothing():
    x, _, inv_freq = rope_inputs(3, 8, 2)
    x.flags.writeable = False
    before = x.copy()
    rotated = apply_rope(x, np.zeros(3, np.int32), inv_freq=inv_freq, interleaved=True)
    assert np.array_equal(rotated, before)
    assert not np.shares_memory(rotated, x)


def test_without_a_base_nothing_turns():
    x, positions, _ = rope_inputs(5, 8, 2)
    inv_freq = inverse_frequencies(8, None, None)
    assert inv_freq.tolist() == [0, 0, 0, 0]
    assert apply_rope(x, positions, inv_freq=inv_freq, interleaved=True).tobytes() == x.tobytes()


def test_strided_views_and_empty_inputs():
    x, positions, inv_freq = rope_inputs(5, 8, 3)
    wide = np.zeros((5, 3, 20), np.float32)
    wide[..., 3:19:2] = x
    expected = apply_rope(x, positions, inv_freq=inv_freq, interleaved=True)
    strided = apply_rope(wide[..., 3:19:2], positions, inv_freq=inv_freq, interleaved=True)
    assert np.array_equal(strided, expected)
    assert apply_rope(x[:0], [], inv_freq=inv_freq, interleaved=True).shape == (0, 3, 8)
    assert apply_rope(x[..., :0], positions, inv_freq=inv_freq[:0], interleaved=True).shape == (5, 3, 0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": np.zeros((2, 4))}, TypeError, r"x: .*float64.*astype"),
        ({"x": np.zeros((2, 4), np.int32)}, TypeError, "x: .*int32"),
        ({"x": np.zeros((2, 3), np.float32)}, ValueError, r"x: .*\(2, 3\)"),
        ({"x": np.zeros(4, np.float32)}, ValueError, r"x: .*\(4,\)"),
        ({"positions": [1, 2, 3]}, ValueError, r"positions: .*\(3,\)"),
        ({"positions": [1.0, 2.0]}, TypeError, "positions: .*float64"),
        ({"inv_freq": np.ones(3)}, ValueError, r"inv_freq: .*\(3,\)"),
        ({"inv_freq": np.ones(2, np.int64)}, TypeError, "inv_freq: .*int64"),
        ({"scaling": 0.0}, ValueError, "scaling: .*0.0"),
        ({"scaling": float("nan")}, ValueError, "scaling: .*nan"),
    ],
)
def test_misuse_names_the_argument(changes, error, message):
    arguments = {
        "x": np.zeros((2, 4), np.float32),
        "positions": [0, 1],
        "inv_freq": np.ones(2),
        "interleaved": True,
    } | changes
    with pytest.raises(error, match=message):
        apply_rope(arguments.pop("x"), arguments.pop("positions"), **arguments)
