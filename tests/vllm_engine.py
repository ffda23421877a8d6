"""One engine, in processes of its own: it reads a job as JSON, {"options": {...}, "rounds": [{...}, ...]}.

A round has its prompts (lists of tokens), how many tokens to generate after each, and may have a note, which is written
to the file that NUMBA_MLA_TEST_NOTE names before the round begins. Prints as a line of JSON that begins with "RESULT":
for each round and prompt the new tokens, their log-probabilities, the two largest ones of each step, and how many of
the prompt's tokens came from the prefix cache; the seconds that each round took; and what vLLM counted of its
speculation.
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=False, **job["options"])
    rounds, seconds = [], []
    for each in job["rounds"]:
        if "note" in each:
            Path(os.environ["NUMBA_MLA_TEST_NOTE"]).write_text(each["note"], encoding="utf-8")
        length = each["new_tokens"]
        sampling = SamplingParams(
            temperature=0, max_tokens=length, min_tokens=length, logprobs=2, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in each["prompts"]], sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        rounds.append([describe(output) for output in outputs])
    counted = {m.name: m.value for m in llm.get_metrics() if "spec_decode_num" in m.name and hasattr(m, "value")}
    print("\nRESULT" + json.dumps({"rounds": rounds, "seconds": seconds, "speculation": counted}), flush=True)


def describe(output) -> dict:
    completion = output.outputs[0]
    steps = completion.logprobs or []
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [step[token].logprob for step, token in zip(steps, completion.token_ids, strict=False)],
        "best_two": [sorted((p.logprob for p in step.values()), reverse=True)[:2] for step in steps],
        "cached": output.num_cached_tokens or 0,
    }


if __name__ == "__main__":
    main()
