"""Changes of the model that may make a step faster, each applied to a trainer's model in place; what wins becomes the library's.

Weights keep their names and shapes, so a checkpoint does not know of them. On a CPU they are held against the model as it is
(tests/test_measure.py); FlexAttention has no backward pass there, so only its values are.
"""

from types import MethodType

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from nanovlm_nb.model.attention import BACKENDS, sdpa_attention
from nanovlm_nb.model.language import (
    LanguageModelGroupedQueryAttention,
    LanguageModelMLP,
    apply_rotary,
)

# --- FlexAttention, with a mask of blocks that is made once a batch

KERNELS = {}  # kind of device -> flex_attention, compiled on a GPU


def kernel_of(kind: str):
    if kind not in KERNELS:
        compiled = torch.compile(flex_attention, dynamic=False)
        KERNELS[kind] = flex_attention if kind == 'cpu' else compiled
    return KERNELS[kind]


def mask_of_blocks(layout, device):
    "Which blocks of 128 positions hold a pair of one document, and inside them which pairs."
    documents = layout.to(device).documents
    rows, length = documents.shape

    def same(row, head, query, key):
        return (documents[row, query] == documents[row, key]) & (query >= key)

    return create_block_mask(
        same, rows, None, length, length, device=device, _compile=device.type == 'cuda'
    )


def flex(q, k, v, layout, causal, dropout_p):
    "As the other backends; without a mask of blocks fused attention takes over."
    mask = getattr(layout, 'block_mask', None)
    if mask is None:
        return sdpa_attention(q, k, v, layout, causal, dropout_p)
    mixed = kernel_of(q.device.type)(
        q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed * (layout.documents > 0)[:, None, :, None]


def use_flex(model):
    "The language model's attention; the mask is made before its first block, outside of what is compiled."
    BACKENDS['flex'] = flex

    def prepare(decoder, args, kwargs):
        layout = kwargs.get('layout', args[1] if len(args) > 1 else None)
        if layout is None or hasattr(layout, 'block_mask'):
            return
        mask = mask_of_blocks(layout, args[0].device)
        for each in (layout, layout.bare):
            if each:
                object.__setattr__(each, 'block_mask', mask)

    model.decoder.register_forward_pre_hook(prepare, with_kwargs=True)
    for module in model.decoder.modules():
        if isinstance(module, LanguageModelGroupedQueryAttention):
            module.backend = 'flex'


# --- one product for what reads the same vectors


def _joined(x, *layers):
    "The outputs of linear layers, from one product."
    weight = torch.cat([layer.weight for layer in layers])
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias for layer in layers])
    return F.linear(x, weight, bias).split([len(layer.weight) for layer in layers], -1)


def _heads(self, x, cos, sin):
    "Queries, keys and values as `LanguageModelGroupedQueryAttention.heads` makes them."
    q, k, v = (
        y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for y in _joined(x, self.q_proj, self.k_proj, self.v_proj)
    )
    return (
        apply_rotary(self.q_norm(q), cos, sin),
        apply_rotary(self.k_norm(k), cos, sin),
        v,
    )


def _gated(self, x):
    "As `LanguageModelMLP`."
    gate, up = _joined(x, self.gate_proj, self.up_proj)
    return self.down_proj(F.silu(gate) * up)


def join_products(model):
    "Queries, keys and values by one product, gate and up by another."
    for module in model.decoder.modules():
        if isinstance(module, LanguageModelGroupedQueryAttention):
            module.heads = MethodType(_heads, module)
        if isinstance(module, LanguageModelMLP):
            module.forward = MethodType(_gated, module)


# --- the vectors between blocks in bfloat16


def keep_bfloat16(model):
    "Patches and tokens enter the first block in bfloat16; sums of blocks stay in it."

    def half(module, args, output):
        return output.bfloat16()

    def half_in(decoder, args, kwargs):
        return (args[0].bfloat16(), *args[1:]), kwargs

    model.vision_encoder.patch_embedding.register_forward_hook(half)
    model.decoder.register_forward_pre_hook(half_in, with_kwargs=True)


#: name -> what is changed; all of them with compiled blocks, beside 'varlen, compiled'
CHANGES = {
    'flex': [use_flex],
    'joined products': [join_products],
    'bfloat16 between blocks': [keep_bfloat16],
    'all three': [use_flex, join_products, keep_bfloat16],
}
