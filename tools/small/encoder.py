"""The text side of the small FLUX.2: a tokenizer trained on the captions and a random, frozen Mistral-3 encoder.

FLUX.2 reads hidden states 10, 20 and 30 of its encoder. This one has 32 thin layers that were never trained: a token
keeps its own random vector on the way up, mixed with a little of what stands before it, and that is all the
transformer needs to tell a dozen words apart. The padding token's vector is zero, so padded rows come out as zeros and
a prompt padded by the pipeline equals one that was padded with zero rows afterwards.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from . import draw

SEED = 6
WIDTH = 64
LAYERS = 32
READ_LAYERS = (10, 20, 30)
SYSTEM_SENTENCE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
# The numbers are those of the tokenizer that FLUX.2 ships with.
_SPECIAL = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 10: "[IMG]", 11: "<pad>"}
_SPECIAL |= {12: "[IMG_BREAK]", 13: "[IMG_END]", 17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]"}
SPECIAL_TOKENS = [_SPECIAL.get(index, f"<SPECIAL_{index}>") for index in range(20)]
PAD_ID = 11
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' }}"
    "{%- elif message['role'] == 'user' %}{{- '[INST]' }}{%- endif %}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'text' %}{{- part['text'] }}{%- else %}{{- '[IMG]' }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{%- if message['role'] == 'system' %}{{- '[/SYSTEM_PROMPT]' }}"
    "{%- elif message['role'] == 'user' %}{{- '[/INST]' }}"
    "{%- else %}{{- eos_token }}{%- endif %}"
    "{%- endfor %}"
)


def corpus() -> list[str]:
    """What the tokenizer learns from: a few thousand captions and instructions, and FLUX.2's system sentence."""
    rng = random.Random(SEED)
    triples = draw.split_triples()[0]
    texts = [draw.caption(draw.random_scene(rng, triples), rng) for _ in range(3000)]
    texts += [draw.random_edit(rng, triples)[2] for _ in range(1500)]
    return texts + [SYSTEM_SENTENCE] * 50


def new_processor():
    """A PixtralProcessor around a byte-level BPE tokenizer in which every caption word is one token.

    The system sentence, the same in front of every prompt, is one token as well. Padding goes to the left.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PixtralImageProcessor, PixtralProcessor, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=760,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(SYSTEM_SENTENCE, normalized=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
    )
    images = PixtralImageProcessor(patch_size={"height": 16, "width": 16}, size={"longest_edge": 64})
    return PixtralProcessor(
        image_processor=images,
        tokenizer=fast,
        patch_size=16,
        spatial_merge_size=2,
        chat_template=CHAT_TEMPLATE,
    )


def new_text_encoder(vocabulary: int):
    """A Mistral3ForConditionalGeneration with random weights from a fixed seed, rounded to float16."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            "vocab_size": vocabulary,
            "hidden_size": WIDTH,
            "intermediate_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "max_position_embeddings": 2048,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "pad_token_id": PAD_ID,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 64,
            "patch_size": 16,
        },
        image_token_index=10,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    model = Mistral3ForConditionalGeneration(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in sorted(model.named_parameters()):
        if "norm" in name:
            parameter.fill_(1.0)
            continue
        spread = 1.0 if "embed_tokens" in name else 0.04
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    model.get_input_embeddings().weight[PAD_ID] = 0.0
    return model.half().float()


def encode_short(text_encoder, processor, texts: list[str], batch: int = 64) -> list[torch.Tensor]:
    """Rows of real tokens only, one [tokens, 3 * WIDTH] tensor a text, through the pipeline's template."""
    from diffusers import Flux2Pipeline

    rows: list[torch.Tensor] = []
    for start in range(0, len(texts), batch):
        part = texts[start : start + batch]
        embeds = Flux2Pipeline._get_mistral_3_small_prompt_embeds(
            text_encoder, processor, part, max_sequence_length=64, hidden_states_layers=list(READ_LAYERS)
        )
        rows += [row[row.abs().sum(1) > 0].clone() for row in embeds]
    return rows


def save(folder: Path) -> None:
    """Write ``text_encoder/`` (float16) and ``tokenizer/`` in the layout that Flux2Pipeline loads."""
    processor = new_processor()
    processor.save_pretrained(folder / "tokenizer")
    # The newest transformers writes a class name that older ones do not know; this one they all read.
    config = folder / "tokenizer" / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    new_text_encoder(len(processor.tokenizer)).half().save_pretrained(folder / "text_encoder")
