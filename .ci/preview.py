"Draw the picture that stands for the site where its address is passed on (nbs/preview.png), and its icon (nbs/favicon.svg)."
import random
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from nanovlm_nb.data.samples import Scene,Thing
from nanovlm_nb.data.shapes import draw_scene

NBS = Path(__file__).resolve().parent.parent/'nbs'
ICON = '''<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">
<rect width="32" height="32" rx="6" fill="#10161f"/>
<circle cx="12" cy="12" r="6" fill="none" stroke="#3f8fd0" stroke-width="3.4"/>
<path d="M9 25h14M9 21h6" stroke="#f0a040" stroke-width="2.6" stroke-linecap="round"/>
</svg>
'''
SCENE = Scene('two',
    (Thing('blue', 'ring', 'large', 'top left'),
    Thing('yellow', 'square', 'small', 'bottom right')))
STEPS = 'picture', 'patches', 'encoder', 'projector', 'decoder', 'answer'


def preview() -> plt.Figure:
    "1,200 x 630: a picture, a question, what happens between, the answer."
    plt.style.use('nanovlm_nb.figures')
    fig = plt.figure(figsize=(12, 6.3), layout='none')
    place = fig.add_axes((.05, .36, .27, .52))
    place.imshow(draw_scene(SCENE, random.Random(3)).resize((512, 512),
        Image.Resampling.NEAREST))
    place.set(xticks=[], yticks=[])
    fig.text(.37, .76, 'nanovlm_nb', fontsize=46, weight='bold')
    fig.text(.37, .65,
        'A vision-language-model trainer that is\nread as a book and run as a program',
        fontsize=23, va='top', linespacing=1.4)
    fig.text(.37, .40, 'What colour is the ring?   BLUE', fontsize=21, color='#005a8c')
    row = fig.add_axes((.05, .08, .9, .18))
    row.set(xlim=(0, 6), ylim=(0, 1))
    row.axis('off')
    for i, step in enumerate(STEPS):
        row.add_patch(FancyBboxPatch((i+.09, .25), .76, .5,
            boxstyle='round,pad=.02,rounding_size=.08', fc='#eef3f8', ec='#5f6368'))
        row.text(i+.47, .5, step, ha='center', va='center', fontsize=18)
        if i:
            row.annotate('', (i+.06, .5), (i-.13, .5),
                arrowprops=dict(arrowstyle='->', lw=1.8, color='#5f6368'))
    return fig


if __name__ == '__main__':
    (NBS/'favicon.svg').write_text(ICON, encoding='utf-8')
    preview().savefig(NBS/'preview.png', dpi=100)
    Image.open(NBS/'preview.png').convert('RGB').quantize(64, dither=Image.Dither.NONE, kmeans=3).save(NBS/'preview.png', optimize=True)
