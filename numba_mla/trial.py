"""The main job: a layer serves ragged requests from a paged cache, is timed, and every result is checked."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter

import ml_dtypes
import numpy as np

from .cache import Batch, PagedLatentCache
from .check import StageError, check_layer, worst_of_calls
from .config import MLAConfig
from .layer import MLALayer

BLOCK_SIZE = 64
CONTINUED = 0  # the request that gets a further chunk


@dataclass(frozen=True)
class HiddenStates:
    """What a layer is given, or what it returned, over a whole trial: float32, one row per token.

    Parameters
    ----------
    prompts : ndarray, (T, hidden_size)
        The prompts of all requests, one after another.
    query_start_loc : ndarray, (B+1,), int64
        Where each request's prompt starts, from 0 to T.
    continuation : ndarray, (C, hidden_size)
        A further chunk of request 0.
    tokens : ndarray, (N, B, hidden_size)
        What is decoded: N steps of one token for every request.
    """

    prompts: np.ndarray
    query_start_loc: np.ndarray
    continuation: np.ndarray
    tokens: np.ndarray

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens of each request's prompt."""
        return np.diff(self.query_start_loc).tolist()

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each request at the end."""
        seq_lens = [length + len(self.tokens) for length in self.prompt_lens]
        seq_lens[CONTINUED] += len(self.continuation)
        return seq_lens

    def steps(self) -> Iterator[tuple[str, dict[Hashable, int], np.ndarray]]:
        """Every call of the layer: its phase, the new tokens of each request, their hidden states."""
        yield "prefill", dict(enumerate(self.prompt_lens)), self.prompts
        if len(self.continuation):
            yield "prefill", {CONTINUED: len(self.continuation)}, self.continuation
        for step in self.tokens:
            yield "decode", dict.fromkeys(range(len(step)), 1), step


INPUT_ARRAYS = tuple(field.name for field in fields(HiddenStates))
OUTPUT_ARRAYS = {name: f"{name}_out" for name in INPUT_ARRAYS if name != "query_start_loc"}
KNOWN_ARRAYS = (*INPUT_ARRAYS, *OUTPUT_ARRAYS.values())  # a file that a trial has written is read again


@dataclass(frozen=True)
class Call:
    """One call of the layer: its phase, its metadata, the time it took and what it returned."""

    phase: str
    batch: Batch
    seconds: float
    output: np.ndarray


@dataclass(frozen=True)
class Phase:
    """How fast one phase of a trial ran; the checks are not in it.

    Parameters
    ----------
    num_tokens : int
        Tokens that went through the layer.
    flops : int
        Multiplications and additions of the projections and of the visible scores and values.
    seconds : float
        Time spent in the layer.
    """

    num_tokens: int
    flops: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens through this one layer, per second."""
        return self.num_tokens / self.seconds if self.num_tokens else 0.0

    @property
    def gflops(self) -> float:
        """10^9 floating point operations per second."""
        return self.flops / self.seconds * 1e-9 if self.num_tokens else 0.0


@dataclass(frozen=True)
class TrialReport:
    """What a trial found.

    Parameters
    ----------
    outputs : HiddenStates
        The layer's outputs, laid out as its inputs.
    warm_up_s : float
        Time of a first, uncounted run of all but the later decodes, compiling included.
    prefill, decode : Phase
        Prompts with the continuation; the decoded tokens.
    cache_bytes, materialised_bytes : int
        The cache's pages; what a key and a value per head would take for as many rows.
    errors : tuple of StageError
        The largest error of each stage against its tolerance.
    """

    outputs: HiddenStates
    warm_up_s: float
    prefill: Phase
    decode: Phase
    cache_bytes: int
    materialised_bytes: int
    errors: tuple[StageError, ...]

    @property
    def within_tolerance(self) -> bool:
        """Whether every result was."""
        return all(error.within_tolerance for error in self.errors)


def random_hidden_states(
    hidden_size: int, dtype: np.dtype, *, num_requests: int, prompt_len: int, num_tokens: int, seed: int
) -> HiddenStates:
    """Draw normal hidden states, as an RMSNorm would leave them, for a ragged batch.

    Prompts have between half of `prompt_len` and all of it, the continuation a quarter.

    Parameters
    ----------
    hidden_size : int
        Width of a row.
    dtype : dtype
        The layer's: rows are rounded to it, so that float32 files hold exactly what the layer saw.
    num_requests, prompt_len, num_tokens : int
        B; the longest prompt; N, the tokens to decode for each request.
    seed : int
        Of numpy's default generator.

    Returns
    -------
    HiddenStates
    """
    rng = np.random.default_rng(seed)
    lens = rng.integers(max(1, prompt_len // 2), prompt_len, size=num_requests, endpoint=True)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal((*shape, hidden_size), dtype=np.float32).astype(dtype).astype(np.float32)

    return HiddenStates(
        prompts=draw(int(lens.sum())),
        query_start_loc=np.concatenate([[0], np.cumsum(lens)]),
        continuation=draw(max(1, prompt_len // 4)),
        tokens=draw(num_tokens, num_requests),
    )


def load_hidden_states(path: Path, hidden_size: int, dtype: np.dtype) -> HiddenStates:
    """Read hidden states from an ``.npz`` file and round them to the layer's dtype.

    Parameters
    ----------
    path : Path
        Holds `prompts` and `query_start_loc`, and if wanted `continuation` and `tokens`: shapes as in
        `HiddenStates`, values of any floating-point type (bfloat16 included).
    hidden_size : int
        The layer's.
    dtype : dtype
        The layer's.

    Returns
    -------
    HiddenStates

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It is no ``.npz`` file, or an array is missing, unknown, not finite, or of another shape or type.
    """
    arrays = _read_npz(path)
    if not {"prompts", "query_start_loc"} <= arrays.keys():
        found = ", ".join(arrays) or "none"
        raise ValueError(f"{path}: expected arrays prompts and query_start_loc, found {found}")
    unknown = [name for name in arrays if name not in KNOWN_ARRAYS]
    if unknown:
        raise ValueError(f"{path}: unknown arrays {', '.join(unknown)}; expected {', '.join(INPUT_ARRAYS)}")
    start = arrays["query_start_loc"]
    if start.ndim != 1 or start.dtype.kind not in "iu" or len(start) < 2:
        raise ValueError(f"{path}: query_start_loc: expected integers (B+1,), got {start.dtype} {start.shape}")
    start = start.astype(np.int64)
    num_requests = len(start) - 1
    row_shapes = {
        "prompts": (hidden_size,),
        "continuation": (hidden_size,),
        "tokens": (num_requests, hidden_size),
    }
    rows = {
        name: _rounded_rows(f"{path}: {name}", arrays.get(name, np.empty((0, *shape))), shape, dtype)
        for name, shape in row_shapes.items()
    }
    if (np.diff(start) == 0).any():
        empty = np.flatnonzero(np.diff(start) == 0).tolist()
        raise ValueError(f"{path}: query_start_loc: each request needs at least one token, got none for {empty}")
    if start[0] != 0 or start[-1] != len(rows["prompts"]) or (np.diff(start) < 0).any():
        raise ValueError(
            f"{path}: query_start_loc: expected to rise from 0 to {len(rows['prompts'])} "
            f"(prompts' rows), got {start.tolist()}"
        )
    return HiddenStates(query_start_loc=start, **rows)


def save_trial(path: Path, inputs: HiddenStates, outputs: HiddenStates) -> None:
    """Write a trial's inputs, as `load_hidden_states` reads them, and its outputs, named ``<input>_out``.

    Parameters
    ----------
    path : Path
        The ``.npz`` file to write.
    inputs, outputs : HiddenStates
        What the layer was given, and what it returned.
    """
    arrays = {name: getattr(inputs, name) for name in INPUT_ARRAYS}
    arrays |= {saved_as: getattr(outputs, name) for name, saved_as in OUTPUT_ARRAYS.items()}
    with path.open("wb") as file:  # a name without .npz stays as it is
        np.savez(file, **arrays)


def run_trial(
    layer: MLALayer,
    weights: Mapping[str, np.ndarray],
    inputs: HiddenStates,
    *,
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
) -> TrialReport:
    """Prefill, continue and decode on a paged cache, time the layer, and check all of its outputs.

    Parameters
    ----------
    layer : MLALayer
        What to run.
    weights : mapping of str to ndarray
        What the layer was built from, fp8 dequantised: the reference starts from these.
    inputs : HiddenStates
        What to run it on.
    on_tokens : callable, optional
        Told after each call of the layer how many tokens it adds to the result: 0 in the uncounted first run.

    Returns
    -------
    TrialReport
    """
    start = perf_counter()
    serve(layer, replace(inputs, tokens=inputs.tokens[:1]), lambda num_tokens: on_tokens(0))
    warm_up_s = perf_counter() - start
    cache, calls = serve(layer, inputs, on_tokens)
    outputs = _like(inputs, [call.output.astype(np.float32) for call in calls])
    return TrialReport(
        outputs=outputs,
        warm_up_s=warm_up_s,
        prefill=_total(calls, "prefill", layer.config, weights),
        decode=_total(calls, "decode", layer.config, weights),
        cache_bytes=cache.nbytes,
        materialised_bytes=_materialised_bytes(cache, layer.config),
        errors=worst_of_calls(_check(layer, weights, inputs, calls, cache)),
    )


def serve(
    layer: MLALayer, inputs: HiddenStates, on_tokens: Callable[[int], None]
) -> tuple[PagedLatentCache, list[Call]]:
    """Run every step on a new cache of just the pages it takes; return that cache and the calls."""
    seq_lens = inputs.seq_lens
    num_blocks = sum(-(-seq_len // BLOCK_SIZE) for seq_len in seq_lens)
    cache = PagedLatentCache(layer.config, num_blocks, BLOCK_SIZE, dtype=layer.dtype)
    for request in range(len(seq_lens)):
        cache.add(request)
    calls = []
    for phase, num_new_tokens, rows in inputs.steps():
        hidden_states = rows.astype(layer.dtype)
        batch = cache.append(num_new_tokens)
        start = perf_counter()
        output = layer(hidden_states, cache, batch)
        calls.append(Call(phase, batch, perf_counter() - start, output))
        cache.commit(batch)
        on_tokens(len(rows))
    return cache, calls


def count_flops(config: MLAConfig, weights: Mapping[str, np.ndarray], batch: Batch) -> int:
    """Count one call's multiplications and additions: every projection, and every visible score and value."""
    num_weights = sum(weight.size for weight in weights.values() if weight.ndim == 2)
    num_visible = int((batch.positions + 1).sum())
    attention = num_visible * config.num_heads * (config.cache_row_width + config.kv_lora_rank)
    return 2 * (len(batch.positions) * num_weights + attention)


def _like(inputs: HiddenStates, outputs: list[np.ndarray]) -> HiddenStates:
    """The outputs of the steps, laid out as the inputs."""
    prompts, *rest = outputs
    continuation = rest.pop(0) if len(inputs.continuation) else inputs.continuation
    tokens = np.stack(rest) if rest else inputs.tokens
    return HiddenStates(prompts, inputs.query_start_loc, continuation, tokens)


def _total(calls: list[Call], phase: str, config: MLAConfig, weights: Mapping[str, np.ndarray]) -> Phase:
    own = [call for call in calls if call.phase == phase]
    return Phase(
        num_tokens=sum(len(call.output) for call in own),
        flops=sum(count_flops(config, weights, call.batch) for call in own),
        seconds=sum(call.seconds for call in own),
    )


def _materialised_bytes(cache: PagedLatentCache, config: MLAConfig) -> int:
    """What a key and a value per head would take for as many rows as the cache has."""
    per_row = config.num_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return cache.num_blocks * cache.block_size * per_row * cache.dtype.itemsize


def _check(
    layer: MLALayer,
    weights: Mapping[str, np.ndarray],
    inputs: HiddenStates,
    calls: list[Call],
    cache: PagedLatentCache,
) -> Iterator[tuple[StageError, ...]]:
    """Check every call."""
    for (_, _, rows), call in zip(inputs.steps(), calls, strict=True):
        yield check_layer(layer, weights, rows.astype(layer.dtype), call.output, cache, call.batch)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it is a single array, as of np.save; use np.savez with named arrays")
        with loaded as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a readable .npz file ({error})") from None


def _rounded_rows(name: str, rows: np.ndarray, row_shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if rows.dtype == np.dtype("V2"):  # what numpy's files make of bfloat16
        rows = rows.view(ml_dtypes.bfloat16)
    if rows.ndim == 0 or rows.shape[1:] != row_shape:
        raise ValueError(f"{name}: expected shape (rows, {', '.join(map(str, row_shape))}), got {rows.shape}")
    if rows.dtype != ml_dtypes.bfloat16 and rows.dtype.kind != "f":
        raise ValueError(f"{name}: expected floating-point values, got {rows.dtype}")
    with np.errstate(over="ignore"):  # refused below
        rounded = rows.astype(dtype).astype(np.float32)
    if not np.isfinite(rounded).all():
        raise ValueError(f"{name}: holds values that are not finite in the layer's {dtype}")
    return rounded
