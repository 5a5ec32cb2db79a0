"""Both passes on a few small problems that reach every edge: odd lengths and dims, GQA, masks, dropout, dtypes."""

import flashtune
import torch

# batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal, dropout_p
PROBLEMS = [
    (1, 2, 2, 128, 128, 64, 64, False, 0.0),
    (2, 4, 2, 65, 130, 128, 128, True, 0.1),
    (1, 2, 1, 70, 33, 40, 40, "top-left", 0.0),
    (1, 1, 1, 17, 200, 72, 24, True, 0.2),
    (1, 2, 2, 129, 127, 256, 256, True, 0.0),
    (1, 1, 1, 1, 5, 3, 7, False, 0.0),
    (2, 80, 8, 130, 130, 64, 64, True, 0.0),  # more tiles than blocks of threads
]

for dtype in (torch.float16, torch.bfloat16):
    for batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal, dropout_p in PROBLEMS:
        q = torch.randn(batch, seqlen_q, heads_q, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        k = torch.randn(batch, seqlen_k, heads_kv, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        v = torch.randn(batch, seqlen_k, heads_kv, head_dim_v, device="cuda", dtype=dtype, requires_grad=True)
        out = flashtune.attention(q, k, v, causal=causal, dropout_p=dropout_p)
        out.sum().backward()
        torch.cuda.synchronize()
        assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))
print(f"{2 * len(PROBLEMS)} problems, both passes")
