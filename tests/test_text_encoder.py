"""The text encoders in shards: only what is read is loaded, and the conditioning is the pipeline's."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from thread_ranks import on_ranks

from comfy_tp.core.checkpoint.files import Checkpoint
from comfy_tp.core.errors import CheckpointError, ConfigError, TPError, UnsupportedError
from comfy_tp.core.load import load_opened
from comfy_tp.core.parts import text_encoder
from comfy_tp.core.parts.prompts import PromptTokenizer
from comfy_tp.core.tp.collectives import Ranks
from comfy_tp.core.tp.linear import ShardedLinear

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """A Mistral-3 of 34 thin layers and a vision tower, saved as a pipeline holds it."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    torch.manual_seed(0)
    config = Mistral3Config(
        text_config={"model_type": "mistral", "num_hidden_layers": 34, "sliding_window": None, **TEXT},
        vision_config={"model_type": "pixtral", "image_size": 32, "patch_size": 16, **VISION},
        image_token_index=10,
    )
    model = Mistral3ForConditionalGeneration(config).eval()
    path = tmp_path_factory.mktemp("mistral") / "text_encoder"
    model.save_pretrained(path)
    return path, model


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=28, **TEXT)).eval()
    path = tmp_path_factory.mktemp("qwen") / "text_encoder"
    model.save_pretrained(path)
    return path, model


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve tokens of which the first five are padding."""
    tokens = torch.randint(12, 60, (1, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[:, :5] = 0
    return tokens, mask


def by_transformers(model, layers) -> torch.Tensor:
    tokens, mask = prompt()
    with torch.inference_mode():
        states = model(
            input_ids=tokens, attention_mask=mask, output_hidden_states=True, use_cache=False
        ).hidden_states
    stacked = torch.stack([states[layer] for layer in layers], dim=1)
    return stacked.permute(0, 2, 1, 3).reshape(1, 12, -1)


@pytest.mark.parametrize("name", ["mistral", "qwen"])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_sharded_encoder_gives_the_hidden_states_of_the_whole_one(request, name, degree):
    path, whole = request.getfixturevalue(name)
    tokens, mask = prompt()

    def work(ranks: Ranks):
        opened = text_encoder.open_text_encoder(Checkpoint.open(path), ranks.degree)
        layers = text_encoder.read_layers(opened)
        model, _ = load_opened(opened, ranks)
        sharded = sum(isinstance(module, ShardedLinear) for module in model.modules())
        return text_encoder.encode(model, layers, tokens, mask, ranks.device), layers, sharded

    for states, layers, sharded in on_ranks(degree, work):
        want = by_transformers(whole, layers)
        assert states.shape == want.shape
        assert ((states - want)[:, 5:].norm() / want[:, 5:].norm()).item() <= 1e-5
        assert (sharded > 0) == (degree > 1)


def test_only_the_layers_that_are_read_are_loaded(mistral):
    path, _ = mistral
    opened = text_encoder.open_text_encoder(Checkpoint.open(path), 2)
    assert len(opened.skeleton.layers) == 30
    assert not any(
        "vision" in piece.tensor or "lm_head" in piece.tensor for p in opened.pieces.values() for piece in p
    )
    kept = sum(opened.checkpoint.entries[p[0].tensor].nbytes for p in opened.pieces.values())
    assert kept < opened.checkpoint.nbytes


def test_an_encoder_without_the_layers_that_are_not_read_is_opened(mistral, tmp_path):
    """However many its config.json still speaks of."""
    shutil.copytree(mistral[0], tmp_path, dirs_exist_ok=True)
    (weights,) = tmp_path.glob("*.safetensors")
    tensors = load_file(weights)
    save_file(
        {name: one for name, one in tensors.items() if ".layers.3" not in name or ".layers.3." in name},
        weights,
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 10**6
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = text_encoder.open_text_encoder(Checkpoint.open(tmp_path), 2)
    assert len(opened.skeleton.layers) == 30


def test_a_degree_that_does_not_divide_the_key_value_heads_replicates_the_encoder(mistral):
    path, whole = mistral
    tokens, mask = prompt()

    def work(ranks: Ranks):
        opened = text_encoder.open_text_encoder(Checkpoint.open(path), ranks.degree)
        model, _ = load_opened(opened, ranks)
        assert not any(isinstance(module, ShardedLinear) for module in model.modules())
        return text_encoder.encode(model, text_encoder.read_layers(opened), tokens, mask, ranks.device)

    for states in on_ranks(3, work):
        assert torch.allclose(states[:, 5:], by_transformers(whole, (10, 20, 30))[:, 5:], atol=1e-5)


def test_an_encoder_with_too_few_layers_is_refused(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=4, **TEXT)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="4 layers, but FLUX.2 reads hidden state 27"):
        text_encoder.open_text_encoder(Checkpoint.open(tmp_path), 2)


def test_a_folder_without_an_encoder_is_refused(tmp_path):
    from flux2_files import small_flux2

    small_flux2().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="no text encoder of FLUX.2"):
        text_encoder.open_text_encoder(Checkpoint.open(tmp_path), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "30"}, "`num_hidden_layers` is '30', not a number"),
        ({"hidden_size": 10**12}, "`hidden_size` is 1000000000000, more than all weights have bytes"),
        ({"num_key_value_heads": 0}, "`num_key_value_heads` is 0, but heads are counted 1, 2, 3"),
        ({"num_key_value_heads": "a"}, "`num_key_value_heads` is 'a', but heads are counted"),
        ({"hidden_size": -1}, r"makes no MistralModel \(RuntimeError: .*negative dimension"),
        ({"hidden_act": "nope"}, r"makes no MistralModel \(KeyError: 'nope'"),
        pytest.param(
            {"layer_types": 5},
            r"makes no MistralModel \(TypeError: ",
            marks=pytest.mark.skipif(
                transformers.__version__.startswith("4."),
                reason="transformers 4 does not look at layer_types",
            ),
        ),
        ({"vocab_size": "x"}, r"makes no MistralModel \(\w+Error: "),
        (None, "`text_config` is None, not a table of settings"),
        ([1], r"`text_config` is \[1\], not a table of settings"),
    ],
    ids=repr,
)
def test_a_config_json_that_makes_no_encoder_is_named(tmp_path, mistral, changes, message):
    shutil.copytree(mistral[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] = {**config["text_config"], **changes} if isinstance(changes, dict) else changes
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message) as caught:
        text_encoder.open_text_encoder(Checkpoint.open(tmp_path), 1)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("architectures", [5, [["a"]], [None], {"a": 1}, "x"], ids=repr)
def test_architectures_that_name_no_class_are_refused(tmp_path, mistral, architectures):
    shutil.copytree(mistral[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": architectures}))
    with pytest.raises(UnsupportedError, match="no text encoder of FLUX.2"):
        text_encoder.key_value_heads(Checkpoint.open(tmp_path))


@pytest.fixture
def tokenizer(tmp_path):
    """The folder of a tokenizer as a pipeline holds it."""
    from comfy_tp.tools.small import encoder

    folder = tmp_path / "tokenizer"
    encoder.new_processor().save_pretrained(folder)
    return folder


def test_a_prompt_has_the_tokens_that_transformers_gives_it(tokenizer):
    from transformers import AutoTokenizer

    prompts = PromptTokenizer(tokenizer, "MistralModel")
    own = AutoTokenizer.from_pretrained(tokenizer)
    for prompt in ("", "A red fox.", "word " * 300):
        expected = own.apply_chat_template(prompts.messages(prompt), return_dict=True)["input_ids"]
        assert prompts.tokens(prompt) == expected[: text_encoder.TOKENS]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", "[]", r"cannot be loaded \(\w+Error: "),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", "null", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", '{"a": 1, "a": 1}', "key 'a' appears twice"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}', r"cannot be loaded \(\w+Error: "),
        ("tokenizer_config.json", '{"added_tokens_decoder": 5}', r"cannot be loaded \(\w+Error: "),
        (
            "tokenizer_config.json",
            '{"model_max_length": "x"}',
            r"(cannot read a prompt|cannot be loaded) \(\w+Error: ",
        ),
        ("chat_template.jinja", "{{ a", r"cannot read a prompt \(TemplateSyntaxError: "),
        ("chat_template.jinja", "{{ a.b.c }}", r"cannot read a prompt \(UndefinedError: "),
        ("chat_template.jinja", "{{ 1 / 0 }}", r"cannot read a prompt \(ZeroDivisionError: "),
        ("chat_template.jinja", "{{ raise_exception('no') }}", r"cannot read a prompt \(TemplateError: no\)"),
        ("chat_template.jinja", "{{ 'a ' * 150_000_000 }}", "makes 300000000 characters of a prompt of 0"),
        ("chat_template.jinja", " " * 1_000_001, "has more than the 1000000 bytes of any real one"),
    ],
)
def test_a_damaged_tokenizer_is_named_when_it_is_opened(tokenizer, file, text, message):
    (tokenizer / file).write_text(text)
    with pytest.raises(TPError, match=message) as caught:
        PromptTokenizer(tokenizer, "MistralModel")
    assert str(tokenizer) in str(caught.value) and "ownload" in str(caught.value)


def test_a_template_that_fails_for_one_prompt_alone_is_named(tokenizer):
    template = (
        "{% if 'fox' in messages[1].content[0].text %}{{ 1 / 0 }}{% endif %}{{ messages[1].content[0].text }}"
    )
    (tokenizer / "chat_template.jinja").write_text(template)
    prompts = PromptTokenizer(tokenizer, "MistralModel")
    assert prompts.tokens("A hen.")
    with pytest.raises(ConfigError, match="cannot read a prompt .ZeroDivisionError"):
        prompts.tokens("A fox.")


def test_a_tokenizer_that_brings_code_is_refused_and_its_code_not_run(tokenizer, monkeypatch):
    ran = tokenizer / "ran"
    (tokenizer / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    auto_map = {"AutoTokenizer": ["evil.EvilTokenizer", None]}
    (tokenizer / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "EvilTokenizer", "auto_map": auto_map})
    )
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(ConfigError, match="custom code"):
        PromptTokenizer(tokenizer, "MistralModel")
    assert not ran.exists()
