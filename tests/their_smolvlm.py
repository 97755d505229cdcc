"A SmolVLM as transformers makes it: random weights, a tokenizer, its image processor and its default chat template."
import transformers
from transformers import Idefics3Processor, SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from nanovlm_nb.core.config import VLMConfig
from nanovlm_nb.data.dataset import shapes_dataset
from nanovlm_nb.core.tokenizer import train_tokenizer

import torch


def make_smolvlm(folder, tied=True):
    "Write one; its processors are Idefics3's, since SmolVLM's own wants torchvision for videos. The template is SmolVLM's."
    extra = VLMConfig(image_convention='smolvlm').vlm_extra_tokens
    said = [w for row in shapes_dataset(60, 'train') for t in row['texts'] for w in (f"User: {t['user']}\nAssistant: {t['assistant']}",)]
    tok = train_tokenizer(said, 448, extra)
    tok.eos_token, tok.chat_template = '<end_of_utterance>', None
    text = dict(model_type='llama', hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=len(tok),
                rope_parameters=dict(rope_theta=7000., rope_type='default'), pad_token_id=2, eos_token_id=tok.eos_token_id, max_position_embeddings=2048, tie_word_embeddings=tied)
    vision = dict(hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=3, image_size=16, patch_size=4)
    torch.manual_seed(1)
    model = SmolVLMForConditionalGeneration(SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=2, image_token_id=tok.image_token_id, tie_word_embeddings=tied)).eval()
    model.generation_config.eos_token_id = tok.eos_token_id
    model.save_pretrained(folder)
    pictures = transformers.Idefics3ImageProcessor(size=dict(longest_edge=32), max_image_size=dict(longest_edge=16))
    Idefics3Processor(pictures, tok, image_seq_len=4, chat_template=DEFAULT_CHAT_TEMPLATE).save_pretrained(folder)
    return folder
