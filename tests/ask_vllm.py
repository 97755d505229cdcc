"""vLLM's greedy answer of an exported Qwen2.5-VL, in an environment that has vLLM: python tests/ask_vllm.py EXPORT QUESTION PICTURE...

`nanovlm ask EXPORT --image PICTURE --prompt QUESTION` must say the same. On a CPU: VLLM_CPU_KVCACHE_SPACE=1, and heads of 32, 64, 80 ... numbers."""

import sys

from PIL import Image
from vllm import LLM, SamplingParams


def main(folder, question, *files):
    llm = LLM(
        model=folder,
        dtype='float32',
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        limit_mm_per_prompt=dict(image=len(files), video=0),
    )
    chat = [
        dict(
            role='user',
            content=[dict(type='image')] * len(files)
            + [dict(type='text', text=question)],
        )
    ]
    text = llm.get_tokenizer().apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    pictures = [Image.open(f).convert('RGB') for f in files]
    (made,) = llm.generate(
        dict(prompt=text, multi_modal_data=dict(image=pictures))
        if files
        else dict(prompt=text),
        SamplingParams(temperature=0, max_tokens=16),
    )
    print(made.outputs[0].text.strip())


if __name__ == '__main__':
    main(*sys.argv[1:])
