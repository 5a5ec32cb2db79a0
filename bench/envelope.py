"""What the best of cuDNN 9.19, FlashAttention-3 and FlashAttention-4 reach on an NVIDIA H200, as its speed over cuDNN's in
the same run: bf16, 16k tokens, heads = 2048 / head_dim. Peers that a machine has not can so be stood in for: cuDNN's
time over ours, measured there, divided by these, is our speed over the best peer's."""

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
OVER_CUDNN = {
    ("forward", 64, False): (1.00, 1.00, 1.10, 1.13, 1.21, 1.22),
    ("forward", 64, True): (1.00, 1.00, 1.09, 1.13, 1.23, 1.25),
    ("forward", 128, False): (1.00, 1.05, 1.08, 1.09, 1.11, 1.11),
    ("forward", 128, True): (1.00, 1.19, 1.28, 1.31, 1.34, 1.34),
    ("forward", 256, False): (1.03, 1.11, 1.14, 1.14, 1.16, 1.17),
    ("forward", 256, True): (1.00, 1.12, 1.23, 1.34, 1.38, 1.39),
    ("backward", 64, False): (1.21, 1.21, 1.21, 1.23, 1.24, 1.25),
    ("backward", 64, True): (1.31, 1.32, 1.30, 1.36, 1.41, 1.39),
    ("backward", 128, False): (1.06, 1.13, 1.13, 1.14, 1.17, 1.19),
    ("backward", 128, True): (1.15, 1.17, 1.19, 1.21, 1.22, 1.21),
    ("backward", 256, False): (1.23, 1.28, 1.21, 1.13, 1.29, 1.32),
    ("backward", 256, True): (1.11, 1.14, 1.17, 1.17, 1.10, 1.20),
}


def over_cudnn(direction, case):
    """The best peer's speed over cuDNN's, or None outside the measured grid."""
    of_class = OVER_CUDNN.get((direction, case["head_dim"], case["causal"]))
    if of_class is None or case["seqlen"] not in LENGTHS:
        return None
    return of_class[LENGTHS.index(case["seqlen"])]
