"""Measure both paths of a layer, and how good ``plan_path``'s choice between them is: ``python benchmarks/paths.py``.

For a grid of new-token counts and prefixes of one request, the attention step (absorption and de-absorption, or
materialisation, included; projections not) is timed both ways in turn. The table shows the planned path and how many
times as long as the better one it took. ``--fit`` prints the unit costs of ``numba_mla.paths`` that explain the times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter

import ml_dtypes
import numpy as np

import numba_mla
from numba_mla import MLAConfig, MLALayer, PagedLatentCache, plan_path
from numba_mla.attention import split_by_path
from numba_mla.checkpoint import attention_shapes
from numba_mla.machine import Yardstick
from numba_mla.parallel import num_threads
from numba_mla.paths import Terms, absorbed_work, materialised_work
from numba_mla.runtime import select_isa

NUM_NEW = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
PREFIXES = [0, 64, 256, 1024, 2048, 4096, 8192, 12288, 16384]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
PATHS = ("absorbed", "materialised")
# How much longer than the better path a choice may take, and on how much of the grid at least.
MARGIN, SHARE = 1.1, 0.9
_MIN_CALLS, _MIN_SECONDS = 3, 0.1


@dataclass(frozen=True)
class Point:
    """One request's new tokens after a prefix: milliseconds of both paths, and the one that is planned."""

    num_new: int
    prefix: int
    absorbed_ms: float
    materialised_ms: float
    planned: str

    @property
    def over_best(self) -> float:
        """The planned path's time over the better one's."""
        planned = self.absorbed_ms if self.planned == "absorbed" else self.materialised_ms
        return planned / min(self.absorbed_ms, self.materialised_ms)


def make_layer(num_heads: int, dtype: np.dtype) -> MLALayer:
    """A layer of DeepSeek's head sizes with random weights; its projections, which are not timed, are small."""
    config = MLAConfig(hidden_size=64, num_heads=num_heads, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
                       qk_rope_head_dim=64, v_head_dim=128)  # fmt: skip
    rng = np.random.default_rng(0)
    return MLALayer(config, {
        name: (rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5).astype(dtype)
        for name, shape in attention_shapes(config).items()
    })  # fmt: skip


def measure(layer: MLALayer, num_new: int, prefix: int, isa: str) -> Point:
    """Compare the results of both paths, then time them in turns."""
    c = layer.config
    rng = np.random.default_rng(1)
    cache = PagedLatentCache(c, -(-(prefix + num_new) // 64), dtype=layer.dtype)
    cache.data[...] = rng.standard_normal(cache.data.shape, np.float32)
    cache.add("request")
    cache.append({"request": prefix})
    batch = cache.append({"request": num_new})
    q = rng.standard_normal((num_new, c.num_heads, c.qk_nope_head_dim + c.qk_rope_head_dim), np.float32)
    values = np.empty((num_new, c.num_heads, c.v_head_dim), layer.dtype)

    def attend(path: str) -> np.ndarray:
        layer._attention(q, cache.data[0], split_by_path(batch.requests, c, layer.dtype, path), None, values)
        return values

    absorbed, materialised = (attend(path).astype(np.float32) for path in PATHS)
    unit = float(ml_dtypes.finfo(layer.dtype).eps)
    if not abs(absorbed - materialised).max() <= max(8 * unit, 1e-4) * abs(absorbed).max():
        raise SystemExit(f"WRONG: the paths disagree at {num_new} new tokens after {prefix}")
    times = [1e3 * seconds for seconds in take_turns([lambda path=path: attend(path) for path in PATHS])]
    return Point(num_new, prefix, *times, plan_path(num_new, prefix, c, isa))


def take_turns(calls: list[Callable[[], object]]) -> list[float]:
    """Median seconds of each call."""
    times: list[list[float]] = [[] for _ in calls]
    while len(times[0]) < _MIN_CALLS or min(map(sum, times)) < _MIN_SECONDS:
        for call, seconds in zip(calls, times, strict=True):
            start = perf_counter()
            call()
            seconds.append(perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def print_table(points: list[Point]) -> None:
    """The planned path (a or m) and its time over the better one's, prefixes down, new tokens across."""
    num_new = list(dict.fromkeys(point.num_new for point in points))
    print(f"{'prefix':>7} " + "".join(f"{n:>8}" for n in num_new))
    for prefix in dict.fromkeys(point.prefix for point in points):
        cells = [f"{point.planned[0]} {point.over_best:5.2f}" for point in points if point.prefix == prefix]
        print(f"{prefix:>7} " + "".join(f"{cell:>8}" for cell in cells))


def share_within(points: list[Point]) -> float:
    """The share of the grid on which the planned path is within the margin of the better one."""
    return sum(point.over_best <= MARGIN for point in points) / len(points)


def fit(points: list[Point], config: MLAConfig, peak_gflops: float) -> Terms:
    """The unit costs, none negative, with the least squares of relative errors in both paths' times."""
    works, times = [], []
    for point in points:
        works += [absorbed_work(point.num_new, point.prefix, config),
                  materialised_work(point.num_new, point.prefix, config)]  # fmt: skip
        times += [point.absorbed_ms, point.materialised_ms]
    relative = np.array(works) / (1e-3 * np.array(times))[:, None]
    scale = np.linalg.norm(relative, axis=0)
    columns = relative / scale
    seconds = np.zeros(len(scale))
    for _ in range(20000):
        for kind, column in enumerate(columns.T):
            rest = 1 - columns @ seconds + column * seconds[kind]
            seconds[kind] = max(0.0, column @ rest)
    return Terms(*(float(f"{unit:.3g}") for unit in seconds / scale * peak_gflops * 1e9))


def plot(points: list[Point], title: str, file: str) -> None:
    """Draw which path is faster by how much, and where the planned one is not within the margin."""
    from matplotlib import pyplot

    num_new = list(dict.fromkeys(point.num_new for point in points))
    prefixes = list(dict.fromkeys(point.prefix for point in points))
    ratios = np.array([np.log2(point.absorbed_ms / point.materialised_ms) for point in points])
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    limit = max(1.0, abs(ratios).max())
    image = axes.imshow(ratios.reshape(len(prefixes), -1), cmap="RdBu", vmin=-limit, vmax=limit, origin="lower")
    figure.colorbar(image, label="log2(absorbed time / materialised time)")
    for index, point in enumerate(points):
        row, column = divmod(index, len(num_new))
        off = point.over_best > MARGIN
        axes.text(column, row, point.planned[0], ha="center", va="center", fontsize=8,
                  color="red" if off else "black", weight="bold" if off else "normal")  # fmt: skip
    axes.set_xticks(range(len(num_new)), num_new)
    axes.set_yticks(range(len(prefixes)), prefixes)
    axes.set(xlabel="new tokens", ylabel="prefix", title=title)
    figure.savefig(file)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new", type=int, nargs="+", default=NUM_NEW, help="new-token counts")
    parser.add_argument("--prefix", type=int, nargs="+", default=PREFIXES, help="cached tokens before them")
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--isa", help="an instruction set by name (the best by default)")
    parser.add_argument("--threads", type=int, help="threads to use")
    parser.add_argument("--fit", action="store_true", help="print the unit costs that explain the times")
    parser.add_argument("--plot", metavar="FILE", help="draw the grid (needs matplotlib, the extra 'plots')")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure the grid and report; 1 if the choice is within the margin on too little of it."""
    options = parse(arguments)
    forced = numba_mla.use_isa(options.isa) if options.isa else contextlib.nullcontext()
    with forced, numba_mla.threads(options.threads or num_threads()):
        layer = make_layer(options.heads, np.dtype(DTYPES[options.dtype]))
        isa = select_isa(None, layer.dtype.name).name
        points = [measure(layer, n, prefix, isa) for prefix in options.prefix for n in options.new]
        yardstick = Yardstick(isa)
        for _ in range(20):
            yardstick.take_peak()
    share = share_within(points)
    title = f"{isa}, {layer.dtype}, {options.heads} heads: within {MARGIN - 1:.0%} of the better path on {share:.0%}"
    unit_costs = fit(points, layer.config, yardstick.gflops)._asdict() if options.fit else None
    if options.plot:
        plot(points, title, options.plot)
    if options.json:
        rows = [asdict(point) | {"over_best": point.over_best} for point in points]
        print(json.dumps({"isa": isa, "dtype": str(layer.dtype), "heads": options.heads, "share": share,
                          "peak_gflops": yardstick.gflops, "unit_costs": unit_costs, "points": rows}))  # fmt: skip
        return int(share < SHARE)
    print_table(points)
    print(f"{title}; peak {yardstick.gflops:.0f} GF/s")
    if unit_costs is not None:
        print(f'"{isa}": Terms({", ".join(f"{kind}={unit:g}" for kind, unit in unit_costs.items())}),')
    return int(share < SHARE)


if __name__ == "__main__":
    sys.exit(main())
