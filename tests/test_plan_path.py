"""plan_path: the cheaper path by its own count of the work, whatever the instruction set."""

import itertools

import pytest

import numba_mla
from numba_mla import MLAConfig, plan_path
from numba_mla.isa.select import MODULES
from numba_mla.paths import LEAST_MATERIALISED, UNIT_COSTS, absorbed_work, materialised_work

NUMBERS = {"hidden_size": 64, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
           "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
CONFIGS = {"v2-lite": MLAConfig(num_heads=16, **NUMBERS), "v3": MLAConfig(num_heads=128, **NUMBERS)}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_speculative_batch_is_absorbed_and_a_fresh_long_prompt_materialised(isa, name):
    for prefix in (0, 1000, 16384, 131072):
        for num_new in (0, 1, 4, LEAST_MATERIALISED - 1):
            assert plan_path(num_new, prefix, CONFIGS[name]) == "absorbed"
        assert plan_path(4096, prefix, CONFIGS[name]) == "materialised"
    assert plan_path(32, 16384, CONFIGS[name]) == "absorbed"
    assert plan_path(1024, 0, CONFIGS[name]) == "materialised"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prefix", [0, 100, 4096, 16384, 10**9])
def test_more_new_tokens_never_go_back_to_absorbed(isa, prefix, name):
    paths = [plan_path(num_new, prefix, CONFIGS[name]) for num_new in range(1, 2049, 9)]
    assert paths == sorted(paths)
    assert "materialised" in paths


def test_the_instruction_set_is_the_one_named_or_in_force():
    name = numba_mla.available_isas()[-1]
    for num_new, prefix in itertools.product((32, 64, 128, 256, 512), (0, 1000, 9000)):
        with numba_mla.use_isa(name):
            in_force = plan_path(num_new, prefix, CONFIGS["v2-lite"])
        assert plan_path(num_new, prefix, CONFIGS["v2-lite"], name) == in_force


def test_every_instruction_set_has_its_costs():
    assert UNIT_COSTS.keys() == MODULES.keys()
    assert all(min(terms) > 0 for terms in UNIT_COSTS.values())


@pytest.mark.parametrize(("num_new", "prefix"), [(1, 0), (5, 0), (3, 7)])
def test_operations_are_counted_one_by_one(num_new, prefix):
    """Multiplications and additions of each product's inner loop, over all of its results."""
    c = MLAConfig(hidden_size=8, num_heads=3, q_lora_rank=None, kv_lora_rank=11, qk_nope_head_dim=5,
                  qk_rope_head_dim=2, v_head_dim=7)  # fmt: skip
    pairs = sum(1 for token in range(num_new) for key in range(prefix + num_new) if key <= prefix + token)
    absorbed, materialised = (work(num_new, prefix, c) for work in (absorbed_work, materialised_work))
    per_lane = 2 * 5 * 11 + 2 * 11 * 7  # q_nope W_UK, W_UV times the attended latent
    assert absorbed.product == num_new * 3 * per_lane
    assert absorbed.latent == pairs * 3 * (2 * (11 + 2) + 2 * 11)
    assert materialised.product == (num_new + prefix) * 3 * per_lane
    assert materialised.prefill == pairs * 3 * (2 * (5 + 2) + 2 * 7)
    assert (absorbed.prefill, materialised.latent) == (0, 0)
