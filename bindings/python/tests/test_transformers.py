"""`flashtune.transformers`: models give what their eager attention gives.

The models are tiny, random and made from configs. They run in fp32 on the CPU and on a GPU, where
the judge's rule compares both with the same model in fp64, whose attention is eager.
"""

import copy

import flashtune
import flashtune.transformers
import pytest
import torch
import transformers
from judge import assert_close
from test_torch import DEVICES
from transformers.masking_utils import AttentionMaskInterface

TOKENS, WINDOW = 40, 12
# Rotary tables of positions up to 72 and their products are the largest part of fp32's error, which
# both implementations share. The rule's naive run is the eager model in fp32.
SIZES = dict(vocab_size=97, num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4)
SHARED = dict(
    **SIZES, num_key_value_heads=2, max_position_embeddings=128,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
GPT2 = dict(
    vocab_size=97, n_layer=2, n_embd=64, n_head=4, n_positions=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SHARED),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHARED, head_dim=16, query_pre_attn_scalar=16,
        sliding_window=WINDOW, attn_logit_softcapping=5.0,
    ),  # fmt: skip
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "mistral": lambda: transformers.MistralConfig(**SHARED, sliding_window=WINDOW),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHARED, head_dim=16, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1
    ),
}


@pytest.fixture(scope="module")
def name():
    # Eager masks have the least number of the model's dtype. In fp64 a score below 0 added to it is
    # -infinity, and rows of padding become NaN. The least number of fp32 hides a key as well.
    masks = AttentionMaskInterface._global_mapping
    theirs = masks["eager"]
    masks["eager"] = lambda **arguments: theirs(**{**arguments, "dtype": torch.float32})
    yield flashtune.transformers.register()
    flashtune.transformers.unregister()
    masks["eager"] = theirs


def made(model):
    torch.manual_seed(0)
    # The grouped products of experts do not take fp64.
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[model](), experts_implementation="eager").eval()


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=CONFIGS)
def models(request, name, device):
    """The same model eager in fp64, eager in fp32, and on flashtune in fp32."""
    model = made(request.param).to(device)
    ours = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    ours.set_attn_implementation(name)
    return copy.deepcopy(model).double(), model, ours


@pytest.fixture
def ids():
    return torch.randint(2, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def placed(ids, device):
    """`ids` where the models are."""
    return ids.to(device)


def positions_of_two(device="cpu"):
    """The positions of two packed sequences."""
    return torch.cat([torch.arange(15), torch.arange(TOKENS - 15)])[None].to(device)


def padded(ids):
    """(ids, attention_mask) with left padding in the first sequence."""
    kept = torch.ones_like(ids)
    kept[0, :7] = 0
    return ids.masked_fill(kept == 0, 0), kept


def judge(models, run, gradient=False):
    """Judges the tensors that `run` returns of each model."""
    exact, naive, actual = ([x.detach().double().cpu().numpy() for x in run(model)] for model in models)
    for at, versions in enumerate(zip(actual, naive, exact)):
        assert_close(f"result {at}", *versions, "float32", gradient)


@torch.no_grad()
def test_a_prefill_equals_eager(models, placed):
    judge(models, lambda model: [model(placed).logits])


@torch.no_grad()
def test_a_padded_prompt_equals_eager_where_it_has_tokens(models, placed):
    ids, kept = padded(placed)
    judge(models, lambda model: [model(ids, attention_mask=kept).logits[kept == 1]])


@torch.no_grad()
def test_packed_sequences_are_independent_of_each_other(models, placed):
    ids, positions = placed[:1], positions_of_two(placed.device)
    judge(models, lambda model: [model(ids, position_ids=positions, use_cache=False).logits])
    if models[2].config.model_type == "gpt_oss":
        return  # This model's own code keeps positions from its masks, so nothing is packed there.
    alone = models[2](ids[:, 15:], use_cache=False).logits
    packed = models[2](ids, position_ids=positions, use_cache=False).logits[:, 15:]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_32_greedy_tokens_of_padded_prompts_equal_eager(models, placed):
    _, eager, ours = models
    ids, kept = padded(placed)
    options = dict(attention_mask=kept, max_new_tokens=32, do_sample=False)
    expected = eager.generate(ids, **options)
    assert expected.shape == (2, TOKENS + 32)
    assert torch.equal(ours.generate(ids, **options), expected)


@torch.no_grad()
def test_a_static_cache_gives_the_same_tokens(name, ids):
    model = made("mistral")
    ids, kept = padded(ids)
    options = dict(attention_mask=kept, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("eager")
    expected = model.generate(ids, **options)
    model.set_attn_implementation(name)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)


def test_a_training_step_has_the_gradients_of_eager(models, placed):
    ids, kept = padded(placed)
    # The last padding token's row sees no key. Eager attention gives it the mean of all values and
    # flashtune 0, so its prediction does not count.
    labels = ids.masked_fill(kept.roll(1, 1) * kept == 0, -100)

    def run(model):
        model.zero_grad()
        loss = model(ids, attention_mask=kept, labels=labels).loss
        loss.backward()
        return [loss[None], *(x.grad for x in model.parameters() if x.grad is not None)]

    judge(models, run, gradient=True)


@torch.no_grad()
def test_lengths_of_packed_sequences_may_be_given(name, ids):
    model = made("llama")
    model.set_attn_implementation(name)
    ids, positions = ids[:1], positions_of_two()
    lengths = torch.tensor([0, 15, TOKENS], dtype=torch.int32)
    given = dict(cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=25, max_length_k=25)
    expected = model(ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(model(ids, position_ids=positions, use_cache=False, **given).logits, expected)
    with pytest.raises(ValueError, match="cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k must be given together"):
        model(ids, use_cache=False, cu_seq_lens_q=lengths)


def mask(batch=1, rule=None, padding=None, **sizes):
    arguments = dict(batch_size=batch, q_length=6, kv_length=6, q_offset=0, kv_offset=0, **{}) | sizes
    if rule is not None:
        arguments["mask_function"] = rule
    return flashtune.transformers.make_mask(**arguments, attention_mask=padding, device="cpu")


def test_masks_that_the_kernels_compute_are_never_made():
    from transformers import masking_utils

    made = mask(rule=masking_utils.sliding_window_causal_mask_function(3))
    assert made.is_causal and made.window == 3 and made.keys is None and made._dense is None
    later = mask(q_length=2, q_offset=4)
    assert later.is_causal and later.window is None
    padding = torch.tensor([[0, 0, 1, 1, 1, 1]])
    assert mask(padding=padding).keys.tolist() == [[[[False, False, True, True, True, True]]]]


@torch.no_grad()
def test_packed_sequences_reach_the_kernels_as_lengths(name, ids, monkeypatch):
    model, seen = made("mistral"), []
    model.set_attn_implementation(name)
    attend_packed = flashtune.transformers._attend_packed
    monkeypatch.setattr(
        flashtune.transformers, "_attend_packed", lambda *qkvf: seen.append(qkvf[-1]) or attend_packed(*qkvf)
    )
    positions = positions_of_two().expand(2, -1)
    model(ids, position_ids=positions, use_cache=False)
    assert seen[0]["cu_seqlens_q"].tolist() == [0, 15, 40, 55, 80] and seen[0]["max_seqlen_k"] == 25
    assert seen[0]["window"] == (WINDOW - 1, None) and seen[0]["causal"] is True


def test_a_mask_that_is_read_is_the_whole_mask():
    made = mask(padding=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    whole = torch.ones(6, 6, dtype=torch.bool).tril() & (torch.arange(6) > 0)
    assert torch.equal(made[:, :, :, :5], whole[None, None, :, :5])
    assert type(made.to(torch.uint8)) is torch.Tensor and torch.equal(made & True, whole[None, None])


def test_other_masks_are_those_of_sdpa():
    from transformers import masking_utils

    chunked = masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=int))
    arguments = dict(batch_size=1, q_length=6, kv_length=6, q_offset=0, kv_offset=0, mask_function=chunked)
    made = flashtune.transformers.make_mask(**arguments, allow_is_causal_skip=False)
    assert type(made) is torch.Tensor
    assert torch.equal(made, masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False))


class Module:
    is_causal = True


def attend(**changes):
    q, k, v = (torch.randn(1, heads, 6, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    return flashtune.transformers.attend(Module(), q, k, v, **{"attention_mask": None, **changes})[0]


def test_without_a_mask_a_causal_module_is_causal():
    causal = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(attend(), attend(attention_mask=causal))
    assert not torch.allclose(attend(), attend(is_causal=False))


def test_masks_of_floats_and_position_biases_are_added():
    bias = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(3))
    hidden = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    expected = attend(attention_mask=bias + hidden)
    torch.testing.assert_close(attend(attention_mask=hidden, position_bias=bias), expected)
    torch.testing.assert_close(attend(attention_mask=hidden == 0, position_bias=bias), expected)
    torch.testing.assert_close(attend(position_bias=bias), expected)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(attention_mask=torch.ones(1, 6)), "attention_mask is torch.float32 of shape .1, 6."),
        (dict(attention_mask="causal"), "attention_mask is str; it must be a tensor"),
        (dict(cache=object()), "cache is given; continuous batching"),
    ],
)
def test_a_wrong_argument_of_a_layer_is_named(change, words):
    with pytest.raises(flashtune.FlashtuneError, match=words):
        attend(**change)


def test_registering_twice_and_removing_twice_change_nothing(name):
    assert flashtune.transformers.register() == name == flashtune.transformers.NAME
    assert flashtune.transformers.register("tuned_too") == "tuned_too"
    for _ in range(2):
        flashtune.transformers.unregister("tuned_too")
        assert "tuned_too" not in transformers.AttentionInterface._global_mapping
        assert "tuned_too" not in AttentionMaskInterface._global_mapping


@pytest.mark.parametrize("wrong", ["flashtune", "my|attention", "", None, "sdpa", "eager"])
def test_names_with_another_meaning_are_refused(wrong):
    with pytest.raises(ValueError, match=f"name is {wrong!r}".replace("|", ".")):
        flashtune.transformers.register(wrong)


def test_an_old_transformers_is_refused():
    with pytest.raises(NotImplementedError, match="this is transformers 4.57.6; flashtune.transformers needs transformers 5.0"):
        flashtune.transformers._expect_version("4.57.6")
