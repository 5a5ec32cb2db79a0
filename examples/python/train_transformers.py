"""Trains a small Llama on this file with transformers, on flashtune's attention.

    PYTHONPATH=bindings/python python3 examples/python/train_transformers.py

It needs PyTorch and transformers 5, downloads nothing, and prints the loss, which falls.
"""

import flashtune
import torch
from transformers import LlamaConfig, LlamaForCausalLM

device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.tensor(list(open(__file__, "rb").read()), device=device)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)

# The five lines of a training run.
model = LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
model.set_attn_implementation(flashtune.transformers.register())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(20):
    batch = torch.stack([text[start : start + 128] for start in torch.randint(len(text) - 128, (8,)).tolist()])
    loss = model(batch, labels=batch).loss
    loss.backward(), optimizer.step(), optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
