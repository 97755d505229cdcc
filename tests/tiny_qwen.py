"Tiny Qwen2.5-VL checkpoints of transformers' own making: random weights, tokenizer, chat template, image processor, as the hub has the large ones."

import json
from inspect import signature

import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

try:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )
except ImportError:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
        Qwen2VLImageProcessor as Qwen2VLImageProcessorPil,
    )  # transformers 4

#: Qwen2.5-VL's own template, as the hub has it
TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Qwen's, in its order; the last two are not special there, and behind those that are about pictures
SPECIAL = [
    '<|endoftext|>',
    '<|im_start|>',
    '<|im_end|>',
    '<|object_ref_start|>',
    '<|object_ref_end|>',
    '<|box_start|>',
    '<|box_end|>',
    '<|quad_start|>',
    '<|quad_end|>',
    '<|vision_start|>',
    '<|vision_end|>',
    '<|vision_pad|>',
    '<|image_pad|>',
    '<|video_pad|>',
]
ADDED = ['<tool_call>', '</tool_call>']
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = [
    'You are a helpful assistant.',
    'system user assistant',
    'What is this?',
    'Which shape do you see? Which colour is it? Where is it? How many?',
    'red orange yellow green blue purple pink white circle ring square bar triangle cross small large top left bottom right middle',
    'Describe the picture. a small red circle, top left',
    'Is there more than one shape? yes no one two three',
]


def tokenizer():
    "Byte-level BPE with Qwen2's rules; special tokens follow the vocabulary, as Qwen's do."
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), 'isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(
            vocab_size=400,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    tok.add_special_tokens(SPECIAL)
    tok.add_tokens(ADDED)
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        eos_token='<|im_end|>',
        pad_token='<|endoftext|>',
        additional_special_tokens=SPECIAL[1:],
        chat_template=TEMPLATE,
    )


def write(folder, tied=False, seed=0, blocks=4, max_pixels=28 * 28 * 64, **save):
    "Writes the whole directory: windows of 112 pixels, full attention in the last block; options of `save_pretrained`."
    tok = tokenizer()
    ids = {t: tok.convert_tokens_to_ids(t) for t in SPECIAL}
    text = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tok) + 10,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_theta=1e6,
        rope_scaling=dict(rope_type='default', mrope_section=[2, 3, 3]),
        use_sliding_window=False,
        eos_token_id=ids['<|im_end|>'],
        bos_token_id=ids['<|endoftext|>'],
        tie_word_embeddings=tied,
    )
    vision = dict(
        hidden_size=32,
        intermediate_size=68,
        depth=blocks,
        num_heads=2,
        out_hidden_size=64,
        fullatt_block_indexes=[blocks - 1],
        window_size=112,
        patch_size=14,
        spatial_merge_size=2,
    )
    named = {
        f'{name}_token_id': ids[f'<|{token}|>']
        for name, token in (
            ('image', 'image_pad'),
            ('video', 'video_pad'),
            ('vision_start', 'vision_start'),
            ('vision_end', 'vision_end'),
        )
    }
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text, vision_config=vision, tie_word_embeddings=tied, **named
        )
    )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(
                0.12 * torch.randn_like(p)
            )  # biases and norms too: a mistake there must show
    model.save_pretrained(folder, **save)
    tok.save_pretrained(folder)
    (folder / 'chat_template.json').write_text(json.dumps(dict(chat_template=TEMPLATE)))
    processor = Qwen2VLImageProcessorPil()
    limit(processor, max_pixels)
    processor.save_pretrained(folder)
    rules = json.loads((folder / 'preprocessor_config.json').read_text())
    rules |= dict(
        image_processor_type='Qwen2VLImageProcessor',
        processor_class='Qwen2_5_VLProcessor',
    )
    (folder / 'preprocessor_config.json').write_text(json.dumps(rules))
    return folder


def flatten(folder):
    "Makes `config.json` and the image processor's file as the hub's are: numbers of the decoder at the top, limits of pixels under their old names."
    config = json.loads((folder / 'config.json').read_text())
    text = config.pop('text_config')
    rope = text.pop('rope_parameters', text)  # transformers 5, or 4
    sections = (text.pop('rope_scaling', None) or rope)['mrope_section']
    del text['model_type']
    config = (
        text
        | config
        | dict(
            rope_theta=rope['rope_theta'],
            rope_scaling=dict(type='mrope', mrope_section=sections),
        )
    )
    config['vision_config'] |= dict(
        model_type='qwen2_5_vl', spatial_patch_size=14, in_chans=3
    )
    config['vision_config'].pop('rope_parameters', None)
    (folder / 'config.json').write_text(json.dumps(config))
    rules = json.loads((folder / 'preprocessor_config.json').read_text())
    size = rules.pop('size')
    (folder / 'preprocessor_config.json').write_text(
        json.dumps(
            rules
            | dict(min_pixels=size['shortest_edge'], max_pixels=size['longest_edge'])
        )
    )
    return folder


def limit(processor, most, least=28 * 28 * 4):
    "Sets the range of pixels of an image processor: `size` of transformers 5, two numbers in 4."
    processor.size = dict(shortest_edge=least, longest_edge=most)
    if hasattr(processor, 'max_pixels'):
        processor.min_pixels, processor.max_pixels = least, most


class Theirs:
    "A checkpoint as transformers has it."

    def __init__(self, folder):
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def pixels(self, picture):
        return self.processor(images=[picture], return_tensors='pt')

    def ids(self, pictures, question, answer=None):
        "Ids of a conversation, written by the chat template."
        chat = [
            dict(
                role='user',
                content=[dict(type='image')] * len(pictures)
                + [dict(type='text', text=question)],
            )
        ]
        if answer:
            chat.append(dict(role='assistant', content=answer))
        first, *rest = self.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=not answer
        ).split('<|image_pad|>')
        text = first
        for picture, part in zip(pictures, rest, strict=True):
            text += (
                '<|image_pad|>'
                * int(self.pixels(picture)['image_grid_thw'].prod() // 4)
                + part
            )
        return self.tokenizer(text, add_special_tokens=False)['input_ids']

    def inputs(self, rows):
        "Arguments of the model for some (pictures, question[, answer]), padded on the right."
        ids = [torch.tensor(self.ids(*row)) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(i) for i in ids], batch_first=True
        )
        made = [self.pixels(picture) for pictures, *_ in rows for picture in pictures]
        seen = (
            {
                name: torch.cat([m[name] for m in made])
                for name in ('pixel_values', 'image_grid_thw')
            }
            if made
            else {}
        )
        if (
            'mm_token_type_ids' in signature(self.model.forward).parameters
        ):  # not in transformers 4
            seen['mm_token_type_ids'] = (
                padded == self.model.config.image_token_id
            ).int()
        return dict(input_ids=padded, attention_mask=mask, **seen)
