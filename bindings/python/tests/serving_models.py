"""Tiny random models, and requests that run on an engine's model and on transformers' at once."""

import torch
import transformers

LONGEST, WINDOW, PAGE, PAGES = 96, 12, 16, 20
SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LONGEST,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, head_dim=16, query_pre_attn_scalar=16,
        sliding_window=WINDOW, attn_logit_softcapping=5.0,
    ),  # fmt: skip
}
# Each logit is a sum over hidden states that both implementations round at each operation.
TOLERANCE = 1e-5


def reference(name):
    """transformers' model with eager attention."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()


class Step:
    """New tokens of some requests, end to end: counts and lengths of each, its row of the table,
    and the row of each token among the rows of all pages.
    """

    def __init__(self, requests, active, positions):
        self.active, self.positions = active, torch.cat(positions)
        self.tokens = torch.cat([requests.tokens[b][at] for b, at in zip(active, positions)])
        self.counts = [len(at) for at in positions]
        self.lengths = torch.tensor([int(at[-1]) + 1 for at in positions], dtype=torch.int32)
        self.table = requests.table[active]
        rows = [requests.table[b, at // PAGE].long() * PAGE + at % PAGE for b, at in zip(active, positions)]
        self.rows = torch.cat(rows)


class Requests:
    """Sequences at different places, whose keys lie in pages of a table."""

    def __init__(self, lengths):
        generator = torch.Generator().manual_seed(1)
        self.tokens = [torch.randint(0, SIZES["vocab_size"], (length,), generator=generator) for length in lengths]
        self.done = [0] * len(lengths)
        pages = LONGEST // PAGE
        self.table = 1 + torch.randperm(pages * len(lengths), generator=generator).int().view(len(lengths), pages)

    def step(self, run, reference, counts):
        """Runs `counts` tokens of the requests, and compares their logits. A request without more
        tokens gets its most probable one.
        """
        active = [b for b, count in enumerate(counts) if count]
        step = Step(self, active, [torch.arange(self.done[b], self.done[b] + counts[b]) for b in active])
        for b, found in zip(active, run(step).split(step.counts)):
            self.done[b] += counts[b]
            with torch.no_grad():
                wanted = reference(self.tokens[b][None, : self.done[b]]).logits[0, -counts[b] :]
            assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), f"request {b} at {self.done[b]}"
            if self.done[b] == len(self.tokens[b]):
                self.tokens[b] = torch.cat([self.tokens[b], found[-1].argmax()[None]])


def serve(run, reference):
    """Chunks of prompts beside single tokens, then greedy tokens."""
    requests = Requests([7, 30, 19])
    for counts in ([7, 12, 0], [1, 18, 5], [1, 1, 14], *[[1, 1, 1]] * 12):
        requests.step(run, reference, counts)
    assert requests.done == [21, 43, 31]
