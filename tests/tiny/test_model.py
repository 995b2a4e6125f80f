from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rstar2_megatron.tiny.build import TinyPaths
from rstar2_megatron.tiny.model import build_model
from rstar2_megatron.tiny.recipe import TinyModelShape
from rstar2_megatron.tiny.tokenizer import TEMPLATE_TAGS, train_tokenizer

TEXTS = [
    "Compute 12+345-6.",
    'naïve  "ünïcode" 3.14\n\n\tprint(f(x))  ',
    "it's <reason>We'll see</reason>\n<answer>\n\\boxed{-17}\n</answer><|im_end|>\n<|im_start|>user\n",
    '{"name":"python_code_with_standard_io","arguments":{"code":"print(bin(12).count(\'1\'))","input":""}}',
    "e\u0301 composed",
]


def test_every_reader_encodes_alike(built: TinyPaths) -> None:
    """transformers puts Qwen's own pre-tokenizer beside a qwen2 config; the file itself must already have it."""
    auto = AutoTokenizer.from_pretrained(built.model)
    raw = Tokenizer.from_file(str(built.model / "tokenizer.json"))
    rows = built.conversations.read_text().splitlines()[:60]
    texts = TEXTS + ["".join(text for text, _ in json.loads(row)["segments"]) for row in rows]
    for text in texts:
        ids = raw.encode(text, add_special_tokens=False).ids
        assert auto.encode(text, add_special_tokens=False) == ids
        assert auto.decode(ids) == text.replace("e\u0301", "\u00e9")


def test_special_tokens_and_tags_are_single_tokens(built: TinyPaths) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *TEMPLATE_TAGS):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    # as with Qwen2.5, skipping special tokens keeps the tags
    ids = tokenizer.encode("<answer>1</answer><|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<answer>1</answer>"
    assert tokenizer.eos_token == "<|im_end|>"


def test_digits_are_single_tokens(built: TinyPaths) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    assert len(tokenizer.encode("1234567890", add_special_tokens=False)) == 10


def test_a_vocabulary_without_room_for_bytes_is_an_error() -> None:
    with pytest.raises(ValueError, match="vocab_size 200 is too small"):
        train_tokenizer(["x"], 200)


def test_model_directory_loads_and_divides_by_two(built: TinyPaths) -> None:
    model = AutoModelForCausalLM.from_pretrained(built.model)
    config = model.config
    assert config.model_type == "qwen2" and config.tie_word_embeddings
    assert config.vocab_size % 64 == 0
    assert config.vocab_size >= len(AutoTokenizer.from_pretrained(built.model))
    assert config.num_attention_heads % 2 == 0 and config.num_key_value_heads % 2 == 0
    assert 1_000_000 < model.num_parameters() < 5_000_000


def test_initial_weights_are_decided_by_the_seed() -> None:
    shape = TinyModelShape(num_layers=1)
    before = torch.random.get_rng_state()
    first, second, other = (build_model(shape, 300, 0, 1, seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert torch.equal(before, torch.random.get_rng_state())


def test_first_layer_looks_back_by_one_more_token_a_head() -> None:
    shape = TinyModelShape(num_layers=1)
    model = build_model(shape, 300, 0, 1, seed=0)
    model.set_attn_implementation("eager")
    ids = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    weights = model(input_ids=ids, output_attentions=True).attentions[0][0]  # [heads, query, key]
    for head in range(shape.num_heads):
        best = weights[head, 20:].argmax(-1)
        assert torch.equal(torch.arange(20, 40) - best, torch.full((20,), head + 1))
