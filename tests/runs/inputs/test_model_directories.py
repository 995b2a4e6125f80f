"""Every row of the section "Model directories" of docs/inputs.md, tried on a directory that is good but for that row."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rstar2_megatron.runs.main import main
from tests.runs.inputs import test_bad_files
from tests.runs.inputs.documented import answers, is_answer
from tests.runs.inputs.models import write_directory
from tests.runs.inputs.test_bad_files import Case

INDEX = "model.safetensors.index.json"
ANSWERS = answers("Model directories")


def tensors(case: Case, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the second shard, which holds the odd ones."""
    file = case.model / "model-1.safetensors"
    content = load_file(file)
    change(content)
    file.unlink()
    save_file(content, file)


def indexed(case: Case, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((case.model / INDEX).read_text())
    change(index["weight_map"])
    (case.model / INDEX).write_text(json.dumps(index))


def whole(case: Case) -> Path:
    """The same weights as one file."""
    for file in [*case.model.glob("*.safetensors"), case.model / INDEX]:
        file.unlink()
    write_directory(case.model)
    return case.model / "model.safetensors"


def config(**keys: Any) -> Callable[[Case], None]:
    return lambda case: case.change("config.json", **keys)


def experts(**keys: Any) -> Callable[[Case], None]:
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return config(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", **{**shape, **keys})


def set_value(name: str, value: float, dtype: torch.dtype = torch.float32) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        write_directory(case.model, shards=2, dtype=dtype)
        for file in case.model.glob("*.safetensors"):
            content = load_file(file)
            if name in content:
                content[name].view(-1)[17] = value
                save_file(content, file)

    return change


def renamed(case: Case) -> None:
    whole(case).rename(case.model / "consolidated.safetensors")


def lost_index(case: Case) -> None:
    (case.model / INDEX).unlink()


def two_sets(case: Case) -> None:
    shutil.copy(case.model / "model-0.safetensors", case.model / "model.safetensors")


def only_pickles(case: Case) -> None:
    torch.save(load_file(whole(case)), case.model / "pytorch_model.bin")
    (case.model / "model.safetensors").unlink()


def wrong_shard(case: Case) -> None:
    indexed(case, lambda names: names.update({"model.norm.weight": "model-0.safetensors"}))


def link_to_nowhere(case: Case) -> None:
    whole(case).rename(case.model.parent / "elsewhere.safetensors")
    (case.model / "model.safetensors").symlink_to("blobs/4d7a")


def no_weights(case: Case) -> None:
    whole(case).unlink()


def in_no_shard(case: Case) -> None:
    indexed(case, lambda names: names.update({"lm_head.weight": "model-0.safetensors"}))


def doubled(case: Case) -> None:
    tensors(case, lambda content: content.update({"model.embed_tokens.weight": torch.zeros(640, 64)}))


def no_map(case: Case) -> None:
    (case.model / INDEX).write_text('{"metadata": {"total_size": 1}}')


def lfs_pointer(case: Case) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
    (case.model / "model-0.safetensors").write_text(text)


def other_bytes(case: Case) -> None:
    """A header whose tensor has more elements than bytes."""
    file = case.model / "model-1.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape":[64]', b'"shape":[65]', 1))


def other_shape(case: Case) -> None:
    tensors(case, lambda content: content.update({"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 64)}))


def no_head(case: Case) -> None:
    case.change("config.json", tie_word_embeddings=False)


def unsaid_tie(case: Case) -> None:
    case.change("config.json", tie_word_embeddings=None)


def more_layers(case: Case) -> None:
    case.change("config.json", num_hidden_layers=3)


def stray_bias(case: Case) -> None:
    tensors(case, lambda content: content.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}))


def integers(case: Case) -> None:
    tensors(case, lambda content: content.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))


def eight_bits(case: Case) -> None:
    norm = torch.zeros(64).to(torch.float8_e4m3fn)
    tensors(case, lambda content: content.update({"model.norm.weight": norm}))


def quantized_beside(case: Case) -> None:
    (case.model / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')


def adapter_alone(case: Case) -> None:
    for file in [*case.model.glob("*.safetensors"), case.model / INDEX, case.model / "config.json"]:
        file.unlink()
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}, case.model / "adapter_model.safetensors")
    (case.model / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}')


def adapter_beside(case: Case) -> None:
    (case.model / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}')


def no_tokenizer(case: Case) -> None:
    (case.model / "tokenizer.json").unlink()


def word_list(case: Case) -> None:
    """The older form of a tokenizer, with more words than the embedding has rows."""
    (case.model / "tokenizer.json").unlink()
    (case.model / "vocab.json").write_text(json.dumps({f"w{i}": i for i in range(700)}))
    (case.model / "merges.txt").touch()


def not_written_to_its_end(case: Case) -> None:
    """As a download leaves it that had made the whole file before."""
    path = whole(case)
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(size // 4)
        file.write(bytes(size - size // 4))


def other_json(case: Case) -> None:
    (case.model / "tokenizer.json").write_text('{"model": {"vocab": {"a": "b"}}, "added_tokens": [{}]}')


def other_end(case: Case) -> None:
    (case.model / "generation_config.json").write_text('{"eos_token_id": [602, 77]}')


def latin_template(case: Case) -> None:
    (case.model / "chat_template.jinja").write_bytes(b"{{ 'Gr\xfc\xdfe' }}")


HERMES = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OWN_WORDING = ("agentloop.chat_template=tokenizer", "agentloop.system_prompt=null", "agentloop.user_prefix=null")


def template(text: str, file: str = "chat_template.jinja") -> Callable[[Case], None]:
    def change(case: Case) -> None:
        (case.model / file).parent.mkdir(exist_ok=True)
        (case.model / file).write_text(text)
        case.words += OWN_WORDING

    return change


def own_template(value: object) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.change("tokenizer_config.json", chat_template=value)
        case.words += OWN_WORDING

    return change


def tool_template(case: Case) -> None:
    template("{{ messages }}")(case)
    template(HERMES, "additional_chat_templates/tool_use.jinja")(case)


def no_model_type(case: Case) -> None:
    path = case.model / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "model_type"}))


def no_merges(case: Case) -> None:
    raw = json.loads((case.model / "tokenizer.json").read_text())
    (case.model / "vocab.json").write_text(json.dumps(raw["model"]["vocab"]))
    (case.model / "tokenizer.json").unlink()


REFUSED: dict[str, Callable[[Case], object]] = {
    "a config that is nested too deeply": lambda c: (c.model / "config.json").write_text('{"a": ' + "[" * 100000),
    "no directory of this name": lambda c: c.words.append(f"rollout.model.model_path={c.model}/nowhere"),
    "weights under another name": renamed,
    "shards without their index": lost_index,
    "no weights": no_weights,
    "a link to nowhere": link_to_nowhere,
    "`model.safetensors` beside an index of other files": two_sets,
    "`.bin` files alone": only_pickles,
    "an index that names another shard": wrong_shard,
    "an index that names a tensor of no shard": in_no_shard,
    "a tensor in two shards": doubled,
    "an index without a map": no_map,
    "a pointer of Git LFS": lfs_pointer,
    "a header that contradicts itself": other_bytes,
    "a tensor of another shape": other_shape,
    "an untied model without a head": no_head,
    "a model without a head that does not say that it is tied": unsaid_tie,
    "more layers than config.json says": more_layers,
    "a bias that the architecture does not have": stray_bias,
    "NaN in the weights": set_value("model.layers.1.mlp.up_proj.weight", float("nan")),
    "infinity in the weights": set_value("model.layers.1.mlp.up_proj.weight", float("-inf")),
    "NaN in bfloat16 weights": set_value("model.norm.weight", float("nan"), torch.bfloat16),
    "infinity in float16 weights": set_value("model.embed_tokens.weight", float("inf"), torch.float16),
    "weights that are whole numbers": integers,
    "weights of 8 bits": eight_bits,
    "a quantized model": config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "a model quantized by compressed-tensors": config(compression_config={"format": "pack-quantized"}),
    "a model quantized by ModelOpt": quantized_beside,
    "a LoRA adapter": adapter_alone,
    "a LoRA adapter beside the weights": adapter_beside,
    "weights that config.json names itself": config(transformers_weights="old-backup.safetensors"),
    "another `model_type`": config(model_type="llama"),
    "no `model_type`": no_model_type,
    "a vocab.json without its merges.txt": no_merges,
    "key/value heads that do not divide": config(num_key_value_heads=3),
    "key/value heads that are no number": config(num_key_value_heads="2"),
    "another number of key/value heads": config(num_key_value_heads=4),
    "a width that the heads do not divide": config(num_attention_heads=6, num_key_value_heads=6),
    "an odd head": config(head_dim=17),
    "a head of no width": config(head_dim=0),
    "another head": config(head_dim=32),
    "a mistyped number of layers": config(num_hidden_layers=4000000000),
    "a switch that is a word": config(tie_word_embeddings="false"),
    "a norm of no positive epsilon": config(rms_norm_eps=-1e-6),
    "rotary scaling by YaRN": config(rope_scaling={"type": "yarn", "factor": 4.0}),
    "linear rotary scaling": config(rope_parameters={"rope_type": "linear", "factor": 2.0}),
    "two rotary scalings": config(rope_scaling={"type": "dynamic", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
    "rotary scaling that is a word": config(rope_scaling="yarn"),
    "a rotary base that is no number": config(rope_theta="1e6"),
    "part of a head rotated": config(partial_rotary_factor=0.5),
    "windows in some layers": config(layer_types=["full_attention", "sliding_attention"] * 2),
    "kinds of other layers": config(layer_types=["full_attention"] * 3),
    "a Mistral that does not say that it has no window": config(
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None
    ),
    "a token beyond the vocabulary": config(pad_token_id=640),
    "a precision that is none": config(torch_dtype="fp16"),
    "experts without a number": experts(num_experts_per_tok="two"),
    "more experts a token than experts": experts(num_experts_per_tok=5),
    "no tokenizer": no_tokenizer,
    "an older tokenizer of another vocabulary": word_list,
    "a tokenizer of another form": other_json,
    "a tokenizer without words": lambda c: c.change("tokenizer.json", model={}),
    "a tokenizer of a newer version": lambda c: c.change("tokenizer.json", pre_tokenizer={"type": "RegexSplitV2"}),
    "a file that was not written to its end": not_written_to_its_end,
    "an end of text that is no token": lambda c: c.change("tokenizer_config.json", eos_token="</s>"),
    "an end of text in generation_config.json that no token is": other_end,
    "a chat template that is not UTF-8": latin_template,
    "a chat template with an open block": template(HERMES + "{% if tools %}"),
    "a chat template with an unknown filter": template(HERMES + "{{ tools | nofilter }}"),
    "a chat template that refuses a question": template(HERMES + "{{ raise_exception('no') }}"),
    "a broken template in tokenizer_config.json": own_template(HERMES + "{{ messages[0].a.b }}"),
}
BEFORE = (
    "a truncated shard",
    "an empty shard",
    "a missing shard",
    "missing tensors",
    "another embedding",
    "a config without heads",
    "a config that is not JSON",
    "another architecture",
    "an added token beyond the embedding",
    "another vocabulary",
    "an end of text that no token is",
    "no end of text",
    "a template without tools",
    "a tokenizer without turns",
)
ALL = {**{name: test_bad_files.CASES[name][0] for name in BEFORE}, **REFUSED}


def tied_twice(case: Case) -> None:
    tensors(case, lambda content: content.update({"lm_head.weight": torch.full((640, 64), 2.0)}))


def backup(case: Case) -> None:
    content = load_file(whole(case))
    save_file({name: tensor + 1 for name, tensor in content.items()}, case.model / "old-backup.safetensors")


def half_floats(case: Case) -> None:
    write_directory(case.model, shards=2, dtype=torch.float16)


def mixed(case: Case) -> None:
    write_directory(case.model, shards=2, dtype=torch.bfloat16)
    tensors(case, lambda content: content.update({"model.norm.weight": torch.zeros(64)}))


def value_head(case: Case) -> None:
    tensors(case, lambda content: content.update({"v_head.summary.weight": torch.zeros(1, 64)}))


NOTED: dict[str, Callable[[Case], object]] = {
    "another set beside `model.safetensors`": backup,
    "a tied model whose file has another head": tied_twice,
    "float16 weights": half_floats,
    "float32 weights": whole,
    "weights of several precisions": mixed,
    "tensors that are no part of the model": value_head,
}


def pickles_beside(case: Case) -> None:
    (case.model / "pytorch_model.bin").write_bytes(b"whatever")
    (case.model / "pytorch_model.bin.index.json").write_text("{}")


def tied_same(case: Case) -> None:
    tensors(case, lambda content: content.update({"lm_head.weight": torch.ones(640, 64)}))


def frequencies(case: Case) -> None:
    tensors(case, lambda content: content.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))


def unindexed(case: Case) -> None:
    """transformers and SGLang load all that the named files hold."""
    indexed(case, lambda names: names.pop("model.norm.weight"))


def one_file_index(case: Case) -> None:
    names = load_file(whole(case))
    (case.model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))


def no_window(case: Case) -> None:
    case.change("config.json", sliding_window=4096, use_sliding_window=False, layer_types=["full_attention"] * 4)


ACCEPTED: dict[str, Callable[[Case], object]] = {
    "one file `model.safetensors`": whole,
    "shards with `model.safetensors.index.json`": lambda case: None,
    "an index of `model.safetensors` alone": one_file_index,
    "an index that leaves out a tensor of its shards": unindexed,
    "`.bin` files beside safetensors": pickles_beside,
    "a tied model whose file has the same head": tied_same,
    "rotary frequencies in the file": frequencies,
    "a window that is switched off": no_window,
    "a template for tools in `additional_chat_templates/tool_use.jinja`": tool_template,
    "a template for tools in tokenizer_config.json": own_template(
        [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": HERMES}]
    ),
}


def spoken(captured: str) -> list[str]:
    return [line for line in captured.splitlines() if line.startswith(("error: ", "warning: "))]


@pytest.mark.parametrize("name", ALL)
def test_refused(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence with the file's name, and no plan; a run ends alike (`test_bad_files`)."""
    case = Case(tmp_path)
    ALL[name](case)
    elsewhere = name == "no directory of this name"  # a plan for another machine
    assert main([*case.arguments(), *([] if elsewhere else ["--dry-run"])]) == 2
    out, err = capfd.readouterr()
    (said,) = spoken(err)
    assert "fits" not in out and "Traceback" not in err and not case.output.exists()
    assert str(case.model) in said
    assert is_answer(said.removeprefix("error: "), ANSWERS[name]), said


@pytest.mark.parametrize("name", NOTED)
def test_accepted_with_a_note(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path)
    precision = "bf16" if "under bf16" in ANSWERS[name] else "fp32"
    case.words += [f"actor.model.precision={precision}", f"rollout.model.precision={precision}"]
    NOTED[name](case)
    assert main([*case.arguments(), "--dry-run"]) == 0
    (said,) = spoken(capfd.readouterr().err)
    assert is_answer(said.removeprefix("warning: "), ANSWERS[name]), said


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path)
    ACCEPTED[name](case)
    assert main([*case.arguments(), "--dry-run"]) == 0
    assert spoken(capfd.readouterr().err) == []
    assert ANSWERS[name] == "accepted"


def test_every_row_is_tried() -> None:
    assert ANSWERS.keys() == ALL.keys() | NOTED.keys() | ACCEPTED.keys()
