"A SmolVLM or Idefics3 as transformers makes it: random weights, a tokenizer, its image processor and its default chat template."

import torch
import transformers
from transformers import Idefics3Processor
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from nanovlm_nb.core.config import VLMConfig
from nanovlm_nb.core.tokenizer import train_tokenizer
from nanovlm_nb.data.shapes import shapes_dataset


def random_smolvlm(kind, tied, tokens, image, side):
    "The model: smolvlm or idefics3; number of tokens, which of them is the image's, pixels of a tile."
    name = dict(smolvlm='SmolVLM', idefics3='Idefics3')[kind]
    text = dict(
        model_type='llama',
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=tokens,
        rope_parameters=dict(rope_theta=7000.0, rope_type='default'),
        pad_token_id=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
    )
    vision = dict(
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=side,
        patch_size=side // 4,
    )
    config = getattr(transformers, f'{name}Config')(
        text_config=text,
        vision_config=vision,
        scale_factor=2,
        image_token_id=image,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(1)
    return getattr(transformers, f'{name}ForConditionalGeneration')(config).eval()


def make_smolvlm(folder):
    "Write one; its processors are Idefics3's, since SmolVLM's own wants torchvision for videos. The template is SmolVLM's."
    said = [
        f"User: {t['user']}\nAssistant: {t['assistant']}"
        for row in shapes_dataset(60, 'train')
        for t in row['texts']
    ]
    tok = train_tokenizer(
        said, 448, VLMConfig(image_convention='smolvlm').vlm_extra_tokens
    )
    tok.eos_token = '<end_of_utterance>'
    tok.chat_template = None
    model = random_smolvlm('smolvlm', True, len(tok), tok.image_token_id, 16)
    model.config.text_config.eos_token_id = model.generation_config.eos_token_id = (
        tok.eos_token_id
    )
    model.save_pretrained(folder)
    pictures = transformers.Idefics3ImageProcessor(
        size=dict(longest_edge=32), max_image_size=dict(longest_edge=16)
    )
    Idefics3Processor(
        pictures, tok, image_seq_len=4, chat_template=DEFAULT_CHAT_TEMPLATE
    ).save_pretrained(folder)
    return folder
