"""One engine in processes of its own: python vllm_engine.py '{"options": ..., "rounds": [[prompt, ...], ...]}'.

Prints, as its last line, JSON: for each round and prompt the new tokens, their log-probabilities, the two largest
log-probabilities of each step, and how many tokens came from the prefix cache.
"""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(sys.argv[1])
    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True, **job["options"])
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], min_tokens=job["max_tokens"], logprobs=2, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    rounds = []
    for prompts in job["rounds"]:
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)
        rounds.append([describe(output) for output in outputs])
    print("\n" + json.dumps(rounds))


def describe(output) -> dict:
    completion = output.outputs[0]
    steps = [sorted((p.logprob for p in step.values()), reverse=True) for step in completion.logprobs]
    chosen = [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": chosen,
        "best_two": [step[:2] for step in steps],
        "cached": output.num_cached_tokens or 0,
    }


if __name__ == "__main__":
    main()
