"""Q, K and V of a problem of bench/decode.py and bench/paged_prefill.py: some queries over keys."""

import torch


def tensors(case):
    generator = torch.Generator("cuda").manual_seed(case["keys"] + case["head_dim"])

    def tensor(seqlen, heads):
        shape = (case["batch"], seqlen, heads, case["head_dim"])
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    keys, heads_kv = case["keys"], case["heads_kv"]
    return tensor(case["queries"], case["heads"]), tensor(keys, heads_kv), tensor(keys, heads_kv)
