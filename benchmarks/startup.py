"""Measure start-up: import, the first decode of a cold and of a warm process: ``python benchmarks/startup.py``.

Each number is of fresh processes, from their start to the end of the first call, interpreter included. Cold
means an empty folder of compiled code; warm means that another process has filled it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from time import perf_counter

IMPORT = "import numba_mla"
DECODE = """
import ml_dtypes, numpy as np, numba_mla
rng = np.random.default_rng(0)
cache = rng.standard_normal((64, 16, 576), dtype=np.float32).astype(ml_dtypes.bfloat16)
q = rng.standard_normal((1, 16, 576), dtype=np.float32).astype(ml_dtypes.bfloat16)
out, lse = numba_mla.decode(q, cache, [list(range(64))], [1000], scale=0.07)
assert np.isfinite(out.astype(np.float32)).all() and np.isfinite(lse).all()
"""
# What start-up is held to, in seconds.
LIMITS = {"import": 0.6, "warm": 1.0, "cold": 15.0}


def seconds(script: str, folder: str) -> float:
    """Time of one fresh process."""
    environment = os.environ | {"NUMBA_MLA_CACHE_DIR": folder}
    start = perf_counter()
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    return perf_counter() - start


def main() -> int:
    """Measure, print; 1 if a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="processes for each number but the cold one")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = {"cold": seconds(DECODE, folder)}
        for name, script in (("import", IMPORT), ("warm", DECODE)):
            measured[name] = statistics.median(seconds(script, folder) for _ in range(options.repeats))
    # The interpreter's own start is not the import's.
    measured["interpreter"] = statistics.median(seconds("", "") for _ in range(options.repeats))
    measured["import"] -= measured["interpreter"]
    if options.json:
        print(json.dumps({"seconds": measured, "limits": LIMITS}, indent=1))
    else:
        for name, limit in LIMITS.items():
            print(f"{name:8} {measured[name]:6.2f} s   (at most {limit} s)")
    return int(any(measured[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
