"""Questions to GGUF files by llama.cpp itself: python ask_llama.py FOLDER KIND SAMPLES.json [f16|f32]
Needs `pip install xllamacpp`, llama.cpp's server as a library. Each sample is {prompt, pictures, question, most}, where <image> in the prompt stands for a
picture; one line of JSON for each answer. The last word is the type of cached keys and values; with f32 attention is computed in f32, too."""

import base64
import json
import sys
from urllib.request import Request, urlopen

import xllamacpp

folder, kind, file, cache = sys.argv[1:5]


def serve():
    "llama.cpp's server on this machine, of one thread."
    p = xllamacpp.CommonParams()
    p.model.path = f'{folder}/model-{kind}.gguf'
    p.mmproj.path = f'{folder}/mmproj-{kind}.gguf'
    p.n_ctx = 2048
    p.n_batch = 512
    p.n_ubatch = 512
    p.n_parallel = 1
    p.warmup = False
    p.fit_params = False
    p.cache_prompt = False
    p.verbosity = 0
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    if cache == 'f32':
        p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        p.flash_attn_type = (
            xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
    return xllamacpp.Server(p)


server = serve()
URL = server.listening_address


def post(path, **values):
    "What the server says."
    return json.load(
        urlopen(
            Request(
                URL + path,
                json.dumps(values).encode(),
                {'Content-Type': 'application/json'},
            ),
            timeout=300,
        )
    )


def picture(path):
    "A file as the server takes it."
    with open(path, 'rb') as f:
        return base64.b64encode(f.read()).decode()


def asked(prompt, pictures, question, most):
    "Ids of the prompt where it has no picture, ids of the answer, and logarithms of the first token's probabilities."
    marker = json.load(urlopen(f'{URL}/props'))['media_marker']
    given = dict(
        prompt=dict(
            prompt_string=prompt.replace('<image>', marker),
            multimodal_data=[picture(p) for p in pictures],
        )
        if pictures
        else prompt
    )
    how = dict(temperature=0, return_tokens=True, cache_prompt=False)
    out = post('/completion', **given, **how, n_predict=most)
    first = post('/completion', **given, **how, n_predict=1, n_probs=10000).get(
        'completion_probabilities'
    )  # none where the token is half a letter
    parts = [
        *(
            dict(
                type='image_url',
                image_url=dict(url='data:image/png;base64,' + picture(p)),
            )
            for p in pictures
        ),
        dict(type='text', text=question),
    ]
    chat = post(
        '/v1/chat/completions',
        messages=[dict(role='user', content=parts)],
        temperature=0,
        max_tokens=most,
        cache_prompt=False,
    )
    return dict(
        ids=None
        if pictures
        else post('/tokenize', content=prompt, parse_special=True, add_special=True)[
            'tokens'
        ],
        read=out['tokens_evaluated'],
        said=out['tokens'],
        logs=first and {e['id']: e['logprob'] for e in first[0]['top_logprobs']},
        chat_read=chat['usage']['prompt_tokens'],
    )


with open(file) as f:
    for sample in json.load(f):
        print(json.dumps(asked(**sample)), flush=True)
