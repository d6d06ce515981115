"""The text encoders in shards: only what is read is loaded, and the conditioning is the pipeline's."""

from __future__ import annotations

import pytest
import torch
from thread_ranks import on_ranks

from comfy_tp.core import text_encoder
from comfy_tp.core.checkpoint.files import Checkpoint
from comfy_tp.core.errors import CheckpointError, UnsupportedError
from comfy_tp.core.linear import ShardedLinear
from comfy_tp.core.loading import load_opened
from comfy_tp.core.ranks import Ranks

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
