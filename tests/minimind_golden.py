"""Make `data/minimind`: tiny files and scores by MiniMind-V's own model code, of three times.

    git clone https://github.com/jingyaogong/minimind-v
    python tests/minimind_golden.py minimind-v tests/data/minimind

Its code is read from the clone's history and run in processes of its own; nothing of it is kept here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

#: name of a golden directory -> commit of MiniMind-V, whether there are experts
CASES = dict(
    middle=('623a130', False), today=('9595617', False), today_moe=('9595617', True)
)
SIZES = dict(
    width=32, blocks=2, heads=4, kv_heads=2, inside=40, tokens=48, vision=768, experts=3
)
PICTURE = 6  # placeholders of a picture
MARK = 34  # id of a placeholder


def their_model(folder, use_moe):
    "A random MiniMind-V without a vision tower, none of whose weights is 0 or 1."
    sys.path.insert(0, str(folder))
    s = SIZES
    if (Path(folder) / 'model' / 'VLMConfig.py').is_file():
        from model.model_vlm import MiniMindVLM
        from model.VLMConfig import VLMConfig

        fields = dict(
            dim=s['width'],
            n_layers=s['blocks'],
            n_heads=s['heads'],
            n_kv_heads=s['kv_heads'],
            hidden_dim=s['inside'],
            max_seq_len=64,
            n_routed_experts=s['experts'],
        )
    else:
        from model.model_vlm import MiniMindVLM, VLMConfig

        fields = dict(
            hidden_size=s['width'],
            num_hidden_layers=s['blocks'],
            num_attention_heads=s['heads'],
            num_key_value_heads=s['kv_heads'],
            intermediate_size=s['inside'],
            max_position_embeddings=64,
            num_experts=s['experts'],
            n_routed_experts=s['experts'],
        )
    MiniMindVLM.get_vision_model = staticmethod(
        lambda *a, **kw: (None, None)
    )  # features are given to it below
    MiniMindVLM.get_image_embeddings = staticmethod(
        lambda pictures, _: (
            pictures.mean((-2, -1)).view(len(pictures), PICTURE, -1).squeeze()
        )
    )
    torch.manual_seed(0)
    model = MiniMindVLM(
        VLMConfig(
            **fields,
            vocab_size=s['tokens'],
            use_moe=use_moe,
            image_ids=[MARK] * PICTURE,
            image_special_token='@' * PICTURE,
            image_token_len=PICTURE,
        )
    ).eval()
    for w in model.parameters():
        w.data = (
            (w.data + 0.05 * torch.randn_like(w)).half().float()
        )  # files are written in half precision
    return model


def batch():
    "Ids (2, 20), a picture in each row, and its features (2, 6, 768)."
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 30, (2, 20), generator=g)
    ids[0, 3 : 3 + PICTURE] = ids[1, 8 : 8 + PICTURE] = MARK
    return ids, torch.randn(2, PICTURE, SIZES['vision'], generator=g).half().float()


@torch.no_grad()
def scores(model):
    "Logits of the batch with its pictures, and of the same ids as text."
    ids, features = batch()
    with_text = model(ids).logits.clone()
    pixels = features.view(
        2, 1, PICTURE * SIZES['vision'], 1, 1
    )  # a picture is its features, see `get_image_embeddings`
    name = 'pixel_values' if hasattr(model, 'lm_head') else 'pixel_tensors'
    return dict(text=with_text, pictures=model(ids, **{name: pixels}).logits.clone())


def main(argv):
    "Make all cases, or be the process that runs foreign code."
    if argv[0] == '--make':
        _, code, use_moe, out = argv
        model = their_model(code, use_moe == '1')
        torch.save(
            {k: w.half() for k, w in model.state_dict().items()},
            Path(out) / 'weights.pth',
        )
        return torch.save(scores(model), Path(out) / 'scores.pt')
    clone, target = map(Path, argv)
    for name, (commit, use_moe) in CASES.items():
        (target / name).mkdir(parents=True, exist_ok=True)
        (code := Path('/tmp') / f'minimind-{commit}').mkdir(exist_ok=True)
        files = subprocess.run(
            ['git', '-C', clone, 'archive', commit, 'model/*.py'],
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        subprocess.run(['tar', '-x', '-C', code], input=files, check=True)
        subprocess.run(
            [
                sys.executable,
                __file__,
                '--make',
                code,
                str(int(use_moe)),
                target / name,
            ],
            check=True,
            env=os.environ | dict(PYTHONPATH=str(code)),
        )
    (target / 'sizes.json').write_text(
        json.dumps(SIZES | dict(picture=PICTURE, mark=MARK), indent=1) + '\n'
    )


if __name__ == '__main__':
    main(sys.argv[1:])
