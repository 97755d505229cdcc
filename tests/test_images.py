"Every kind of picture: what becomes of it, or why it is refused; augmentation; pixels of the faster ways."
import io
import pickle
import random
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, PngImagePlugin, features
from torch.utils.data import DataLoader

from nanovlm_nb.data.images import (MAX_PIXELS, ImageProcessor, UnreadableImage, get_image_processor, global_view, image_size, open_header,
                               open_image, split_tiles)

pytestmark = pytest.mark.usefixtures('one_thread')

COLOURS = np.array([[[230, 30, 30], [30, 200, 60]], [[40, 60, 220], [240, 220, 40]]], dtype=np.uint8)
FOUR = Image.fromarray(COLOURS).resize((32, 32), Image.Resampling.NEAREST)
GREY = np.array([[10, 80], [160, 250]], dtype=np.uint8).repeat(16, 0).repeat(16, 1)


def encode(im, fmt='PNG', **kw) -> bytes:
    "A picture as a file."
    b = io.BytesIO()
    im.save(b, fmt, **kw)
    return b.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    "A chunk of a PNG."
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))


def png(w, h, depth, colour, rows: bytes) -> bytes:
    "A PNG by hand: `rows` are bytes with a filter byte before each line."
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', w, h, depth, colour, 0, 0, 0)) + chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b'')


def deep_rgb() -> bytes:
    "FOUR with 16 bits a colour; the lower byte is noise."
    wide = np.asarray(FOUR).astype('>u2')*256 + np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype('>u2')
    return png(32, 32, 16, 2, b''.join(b'\0' + line.astype('>u2').tobytes() for line in wide))


def adobe(marker: bool) -> bytes:
    "A CMYK JPEG, inverted as Adobe does it, with Adobe's marker or without."
    b = encode(FOUR.convert('CMYK'), 'JPEG', quality=100, subsampling=0)
    at = b.index(b'\xff\xee')
    return b if marker else b[:at] + b[at+2+struct.unpack('>H', b[at+2:at+4])[0]:]


def with_alpha(im, alpha=40):
    "The picture, nearly transparent."
    im = im.copy()
    im.putalpha(alpha)
    return im


def clear_palette():
    "FOUR as a palette whose entries are half and fully transparent."
    return encode(FOUR.convert('P', palette=Image.Palette.ADAPTIVE, colors=4), transparency=bytes([0, 128, 255, 7]))


def on_white(im, alpha):
    "A picture of which `alpha`, 0 to 255, one number or one for each pixel, is there; the rest is white."
    x, share = np.asarray(im), np.reshape(alpha, (*np.shape(alpha), *[1]*(np.ndim(im)-np.ndim(alpha))))/255
    return share*x + (1-share)*255


FRAMES = dict(save_all=True, append_images=[FOUR.rotate(90), FOUR.rotate(180)])
KINDS = dict(  # name -> (file, what it should look like, largest difference)
    rgb=(encode(FOUR), FOUR, 0), bmp=(encode(FOUR, 'BMP'), FOUR, 0), ppm=(encode(FOUR, 'PPM'), FOUR, 0), tiff=(encode(FOUR, 'TIFF'), FOUR, 0),
    jpeg=(encode(FOUR, 'JPEG', quality=100, subsampling=0), FOUR, 8), webp=(encode(FOUR, 'WEBP', lossless=True), FOUR, 0),
    grey=(encode(Image.fromarray(GREY)), GREY, 0), bits=(encode(Image.fromarray(GREY > 100)), (GREY > 100)*np.uint8(255), 0),
    palette=(encode(FOUR.convert('P', palette=Image.Palette.ADAPTIVE, colors=4)), FOUR, 0), clear_palette=(clear_palette(), on_white(FOUR, np.array([0, 128, 255, 7])[np.asarray(FOUR.convert('P', palette=Image.Palette.ADAPTIVE, colors=4))]), 1),
    one_clear_colour=(encode(FOUR, transparency=(230, 30, 30)), on_white(FOUR, 255*(np.asarray(FOUR)[..., 0] != 230)), 0), rgba=(encode(with_alpha(FOUR)), on_white(FOUR, 40), 1), rgba_webp=(encode(with_alpha(FOUR), 'WEBP', lossless=True), on_white(FOUR, 40), 1),
    la=(encode(with_alpha(Image.fromarray(GREY))), on_white(GREY, 40), 1),
    deep_grey_clear=(encode(Image.fromarray(GREY.astype(np.uint16)*257), transparency=80*257), on_white(GREY, 255*(GREY != 80)), 0), deep_grey=(encode(Image.fromarray(GREY.astype(np.uint16)*257)), GREY, 0),
    deep_grey_tiff=(encode(Image.fromarray(GREY.astype(np.uint16)*257), 'TIFF'), GREY, 0), int_tiff=(encode(Image.fromarray(GREY.astype(np.int32)*257), 'TIFF'), GREY, 0),
    deep_rgb=(deep_rgb(), FOUR, 0), cmyk_tiff=(encode(FOUR.convert('CMYK'), 'TIFF'), FOUR, 0), cmyk_adobe=(adobe(True), FOUR, 8), cmyk_plain=(adobe(False), FOUR, 8),
    gif=(encode(FOUR, 'GIF'), FOUR, 0), moving_gif=(encode(FOUR, 'GIF', **FRAMES), FOUR, 0), moving_webp=(encode(FOUR, 'WEBP', lossless=True, **FRAMES), FOUR, 0),
    apng=(encode(FOUR, **FRAMES), FOUR, 0), apng_with_still=(encode(FOUR, default_image=True, **FRAMES), FOUR, 0), pages=(encode(FOUR, 'TIFF', **FRAMES), FOUR, 0),
    mpo=(encode(FOUR, 'MPO', quality=100, subsampling=0, **FRAMES), FOUR, 8))


@pytest.mark.parametrize('kind', KINDS)
def test_kind(kind):
    "Size from the header, RGB pixels, tiles; from bytes, from a file object and from a dictionary."
    b, want, tolerance = KINDS[kind]
    want = np.asarray(want)
    want = want if want.ndim == 3 else np.stack([want]*3, -1)
    for src in (b, bytearray(b), io.BytesIO(b), dict(bytes=b, path='gone.png')):
        assert image_size(src) == (32, 32)
        got = open_image(src)
        assert got.mode == 'RGB' and np.abs(np.asarray(got).astype(int) - want).max() <= tolerance
    tiles, grid = get_image_processor(32, 16)(b)
    assert grid == (2, 2)
    assert np.abs(tiles[1:].float().mean((2, 3)).numpy() - want[::16, ::16].reshape(4, 3)).max() <= tolerance


@pytest.mark.parametrize('mode', ['LA', 'RGBA', 'RGBa', 'PA'])
def test_hidden_colours(mode):
    "White shows, as in transformers since 5.23, and what is under a transparent place has no part in the result."
    noise = np.random.default_rng(0)
    mask = noise.integers(0, 256, (16, 16), dtype=np.uint8)*noise.integers(0, 2, (16, 16), dtype=np.uint8)
    seen, hidden = (noise.integers(0, 256, (16, 16, 3), dtype=np.uint8) for _ in range(2))
    pictures = [Image.fromarray(np.dstack([np.where(mask[..., None], seen, under), mask])) for under in (seen, hidden)]
    if mode == 'PA': pictures = [im.convert('RGB').quantize(8).convert('PA') for im in pictures[:1]]
    shown = [np.asarray(open_image(im.convert(mode))).astype(int) for im in pictures]
    white = Image.new('RGBA', (16, 16), 'white')
    for im, got in zip(pictures, shown): assert np.abs(got - np.asarray(Image.alpha_composite(white, im.convert(mode).convert('RGBA')).convert('RGB'))).max() == 0 and np.abs(got - shown[0]).max() == 0
    if mode != 'PA': assert (shown[0][mask == 0] == 255).all() and np.abs(shown[0] - np.asarray(pictures[0].convert('RGB'))).max() > 100


def test_first_frames_move():
    "The files of several frames above have several, with other pixels."
    for kind in ('moving_gif', 'moving_webp', 'apng', 'apng_with_still', 'pages', 'mpo'):
        im = Image.open(io.BytesIO(KINDS[kind][0]))
        assert im.n_frames >= 3, kind
        im.seek(1 if kind != 'apng_with_still' else 2)
        assert np.abs(np.asarray(im.convert('RGB')).astype(int) - np.asarray(FOUR)).max() > 100, kind


@pytest.mark.skipif('avif' not in features.modules or not features.check('avif'), reason='Pillow without AVIF')
def test_avif():
    "AVIF, where Pillow has it."
    b = encode(FOUR, 'AVIF', quality=100, subsampling='4:4:4')
    assert image_size(b) == (32, 32) and np.abs(np.asarray(open_image(b)).astype(int) - np.asarray(FOUR)).max() <= 8
    with pytest.raises(UnreadableImage): open_image(b[:len(b)//2])


@pytest.mark.parametrize('size', [(1, 1), (50, 1), (1, 50), (1, 3000), (333, 7)])
@pytest.mark.parametrize('enlarge', [False, True])
def test_proportions(size, enlarge):
    "Tiny and narrow pictures: what the header plans is what comes."
    proc = get_image_processor(128, 32, enlarge)
    for fmt in ('PNG', 'JPEG', 'GIF', 'WEBP', 'TIFF', 'BMP'):
        b = encode(Image.new('RGB', size, (200, 10, 30)), fmt)
        tiles, grid = proc(b)
        assert grid == proc.grid(*image_size(b)) and len(tiles) == proc.n_tiles(*size) and min(grid) >= 1
        assert (tiles.float().mean((0, 2, 3)) - torch.tensor([200., 10, 30])).abs().max() < 5


def xmp(orientation: int) -> str:
    "XMP data with an orientation."
    return f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'


def test_xmp_turns_like_datasets():
    "An orientation in XMP data counts as in `datasets`, and neither kind of flag is applied twice."
    im = FOUR.resize((40, 24))
    info = PngImagePlugin.PngInfo()
    info.add_itxt('XML:com.adobe.xmp', xmp(6))
    for b in (encode(im, pnginfo=info), encode(im, 'WEBP', lossless=True, xmp=xmp(8).encode())):
        want = datasets.Image().decode_example(dict(bytes=b, path=None))
        assert image_size(b) == want.size
        once = open_image(b)
        for got in (once, open_image(once), open_image(open_image(once))): assert np.array_equal(np.asarray(got), np.asarray(want.convert('RGB')))


def test_damaged_flag():
    "Numbers that are no orientation turn nothing."
    for value in (0, 9, 300):
        exif = Image.Exif()
        exif[0x0112] = value
        b = encode(FOUR.resize((40, 24)), exif=exif)
        assert image_size(b) == open_image(b).size == (40, 24)


# --- refused

def claims(fmt: str, w: int, h: int) -> bytes:
    "A file of 32 x 32 pixels whose header says w x h."
    b = bytearray(KINDS[dict(PNG='rgb', JPEG='jpeg', GIF='gif', BMP='bmp', TIFF='tiff', PPM='ppm')[fmt]][0])
    if fmt == 'PNG': b[8:33] = chunk(b'IHDR', struct.pack('>II', w, h) + bytes(b[24:29]))
    if fmt == 'JPEG': at = b.index(b'\xff\xc0'); b[at+5:at+9] = struct.pack('>HH', h, w)
    if fmt == 'GIF': b[6:10] = struct.pack('<HH', w, h)
    if fmt == 'BMP': b[18:26] = struct.pack('<ii', w, h)
    if fmt == 'PPM': b = bytearray(bytes(b).replace(b'32 32', f'{w} {h}'.encode()))
    if fmt == 'TIFF':
        at = struct.unpack('<I', b[4:8])[0]
        for i in range(struct.unpack('<H', b[at:at+2])[0]):
            entry = at + 2 + 12*i
            if (tag := struct.unpack('<H', b[entry:entry+2])[0]) in (256, 257): b[entry+2:entry+12] = struct.pack('<HII', 4, 1, w if tag == 256 else h)
    return bytes(b)


def lying_icon() -> bytes:
    "An icon of Apple's kind: its type says 128 x 128, the picture in it has 32 x 32."
    inner = KINDS['rgb'][0]
    return b'icns' + struct.pack('>I', 16+len(inner)) + b'ic07' + struct.pack('>I', 8+len(inner)) + inner


BOMBS = {fmt: claims(fmt, 10_000, 10_000) for fmt in ('PNG', 'JPEG', 'GIF', 'BMP', 'TIFF', 'PPM')}
HUGE = {fmt: claims(fmt, 30_000, 30_000) for fmt in BOMBS}
REFUSED = dict(  # name -> (source, what the message says)
    empty=(b'', '0 bytes'), text=(b'not a picture', "start with b'not a pictur'"), nothing=(None, 'missing'), number=(7, '7 is a int'), fraction=(1.5, 'is a float'),
    truth=(True, 'is a bool'), a_list=([KINDS['rgb'][0]], 'is a list'), empty_list=([], 'is a list'), array=(np.asarray(FOUR), 'is a ndarray'), address=('https://x.org/a.png', 'is an address'), no_data=('data:image/png;base64,AAAA', 'cannot identify'), empty_dict=({}, 'missing'),
    dict_of_none=(dict(bytes=None, path=None), 'missing'), dict_of_number=(dict(bytes=3), '3 is a int'), dict_of_dict=(dict(bytes=dict(bytes=b'')), 'is a dict'),
    no_file=('nowhere/missing.png', 'nowhere/missing.png'), no_path=(Path('nowhere.png'), 'nowhere.png'), no_name=('', ''), nul=('a\0b', 'null'),
    folder=(Path(__file__).parent, 'Is a directory'), this_file=(__file__, 'cannot identify file'), text_file=(io.StringIO('text'), 'ValueError'), closed=(io.BytesIO(b'x'), 'closed'),
    no_pixels=(Image.new('RGB', (0, 5)), '0 x 5'), eps=(encode(FOUR, 'EPS'), 'Ghostscript')) | {
    f'bomb_{fmt}': (b, '10000 x 10000 pixels are more than the limit of 89,478,485: scale') for fmt, b in BOMBS.items()} | {
    f'huge_{fmt}': (b, 'Scale the picture down, to 89,478,485') for fmt, b in HUGE.items()}
REFUSED['closed'][0].close()


@pytest.mark.parametrize('name', REFUSED)
def test_refused(name):
    "From the header already: one kind of error, a message, no warning."
    src, message = REFUSED[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        for f in (open_header, image_size, open_image, get_image_processor(32, 16)):
            with pytest.raises(UnreadableImage) as e: f(src)
            assert message in str(e.value) and type(pickle.loads(pickle.dumps(e.value))) is UnreadableImage
    assert not [w for w in seen if 'ecompression' in str(w.message)]


@pytest.mark.filterwarnings('ignore::UserWarning:PIL')
@pytest.mark.parametrize('kind', [k for k in KINDS if k != 'apng_with_still'])
def test_truncated(kind):
    "Half a file has a size or none, and no pixels. (Half an APNG may hold its whole first frame.)"
    b = KINDS[kind][0]
    half = b[:len(b)//2] if 'apng' not in kind and 'moving' not in kind and kind not in ('pages', 'mpo') else b[:60]
    try: assert image_size(half) == (32, 32)
    except UnreadableImage: pass
    for f in (open_image, get_image_processor(32, 16)):
        with pytest.raises(UnreadableImage): f(half)


def test_pixels_tell():
    "What only the pixels show: floating point, and a size other than the header's."
    floats = encode(Image.fromarray(np.ones((4, 4), np.float32)), 'TIFF')
    assert image_size(floats) == (4, 4)
    with pytest.raises(UnreadableImage, match='mode F'): open_image(floats)
    assert image_size(lying_icon()) == (128, 128)
    with pytest.raises(UnreadableImage, match=r'header says \(128, 128\).* \(32, 32\) pixels|allowed sizes'): open_image(lying_icon())


def test_limits_are_lifted_on_use():
    "Importing changes nothing in PIL; opening a bomb gives the error and nothing on stderr, even if warnings are errors."
    code = '''
import warnings, sys
from PIL import Image, PngImagePlugin
quiet = 'ignore', None, Image.DecompressionBombWarning, None, 0
def state(): return warnings.filters.count(quiet), Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK
before = state()
import nanovlm_nb.data.images as images
assert state() == before and before[0] == 0
try: images.image_size(sys.stdin.buffer.read())
except images.UnreadableImage as e: assert '10000 x 10000' in str(e)
else: raise SystemExit('it was opened')
assert state() == (1, before[1], images.MAX_PNG_TEXT)
'''
    done = subprocess.run([sys.executable, '-W', 'error::RuntimeWarning', '-c', code], input=BOMBS['PNG'], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b'')
    assert MAX_PIXELS == Image.MAX_IMAGE_PIXELS


def test_files_are_closed(tmp_path):
    "Reading headers of files leaves none open; a file that the caller opened stays open."
    file = tmp_path/'a.png'
    file.write_bytes(KINDS['rgb'][0])
    with warnings.catch_warnings():
        warnings.simplefilter('error', ResourceWarning)
        for src in (file, str(file), dict(bytes=None, path=str(file))): assert image_size(src) == (32, 32)
    with open(file, 'rb') as f:
        assert image_size(f) == (32, 32) and open_image(f).size == (32, 32) and not f.closed


# --- augmentation

def flip(image, rng):
    "Mirrored, always."
    return ImageOps.mirror(image)


def maybe(image, rng):
    "Mirrored in half of the cases."
    return ImageOps.mirror(image) if rng.random() < .5 else image


def grey(image, rng):
    "Without colour."
    return image.convert('L')


def half(image, rng):
    "Half as wide."
    return image.resize((image.width//2, image.height))


class Counter:
    "Counts its calls and darkens what it gets, in place."
    def __init__(self): self.calls = 0

    def __call__(self, image, rng):
        self.calls += 1
        image.paste((0, 0, 0), (0, 0, 3, 3))
        return image


def test_flip_is_applied_once():
    "A transform sees the decoded, upright RGB picture once, whatever the source; pictures in memory are left alone."
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encode(FOUR.transpose(Image.Transpose.ROTATE_90), exif=exif)
    want = get_image_processor(32, 16)(ImageOps.mirror(FOUR))[0]
    for src in (FOUR, encode(FOUR), turned, dict(bytes=encode(with_alpha(FOUR, 255)))): assert get_image_processor(32, 16, custom_transforms=[flip])(src)[0].equal(want)
    assert get_image_processor(32, 16, custom_transforms=(flip, flip))(FOUR)[0].equal(get_image_processor(32, 16)(FOUR)[0])
    count, before = Counter(), FOUR.tobytes()
    proc = get_image_processor(32, 16, custom_transforms=(count,))
    first, second = proc(FOUR)[0], proc(FOUR)[0]
    assert count.calls == 2 and FOUR.tobytes() == before and first.equal(second) and first[1, :, :3, :3].max() == 0


def test_chance_is_given():
    "The same chance gives the same picture; none given is always the same one."
    proc = get_image_processor(32, 16, custom_transforms=(maybe,))
    looks = [proc(FOUR, random.Random(f'run/{epoch}/a'))[0] for epoch in range(40)]
    again = [proc(FOUR, random.Random(f'run/{epoch}/a'))[0] for epoch in range(40)]
    assert all(a.equal(b) for a, b in zip(looks, again))
    assert 5 < sum(x.equal(looks[0]) for x in looks) < 35
    assert proc(FOUR)[0].equal(proc(FOUR, random.Random(0))[0]) and proc(FOUR)[0].equal(proc(FOUR)[0])


def test_two_pictures_share_the_chance():
    "A generator that is passed on is drawn from once a picture."
    proc, rng = get_image_processor(32, 16, custom_transforms=(maybe,)), random.Random(3)
    got = [proc(FOUR, rng)[0] for _ in range(8)]
    draws = random.Random(3)
    flipped = get_image_processor(32, 16)(ImageOps.mirror(FOUR))[0]
    assert [x.equal(flipped) for x in got] == [draws.random() < .5 for _ in range(8)]


def test_wrong_transforms():
    "Each mistake names the transform and what to do."
    with pytest.raises(ValueError, match=r'transform half made \(32, 64\) of \(64, 64\), which is a grid of \(2, 1\) tiles and not of \(2, 2\).*return a picture of the size it gets') as e:
        get_image_processor(64, 32, custom_transforms=(flip, half))(FOUR.resize((64, 64)))
    assert not isinstance(e.value, UnreadableImage)  # a mistake of the user, which must not count as a damaged picture
    assert get_image_processor(64, 32, custom_transforms=(half,))(FOUR)[1] == (1, 1)  # another size, the same grid
    with pytest.raises(TypeError, match='transform asarray_ returned a ndarray: return a PIL image'): get_image_processor(64, 32, custom_transforms=(asarray_,))(FOUR)
    for wrong in ([flip, 'flip'], [None], 'ab'):
        with pytest.raises(TypeError, match='cannot be called: give transform'): get_image_processor(64, 32, custom_transforms=wrong)
    with pytest.raises(TypeError, match='give a tuple'): get_image_processor(64, 32, custom_transforms=flip)
    assert get_image_processor(32, 16, custom_transforms=(grey,))(FOUR)[0].shape == (5, 3, 16, 16)


def asarray_(image, rng):
    "No picture."
    return np.asarray(image)


def test_workers_get_transforms():
    "A processor with transforms of a module goes to a loader worker."
    proc = get_image_processor(32, 16, custom_transforms=[flip, Counter()])
    assert pickle.loads(pickle.dumps(proc)).custom_transforms[0] is flip
    loader = DataLoader([encode(FOUR)]*2, batch_size=None, num_workers=1, collate_fn=proc)
    assert all(tiles.equal(proc(FOUR)[0]) for tiles, _ in loader)


# --- pixels

@pytest.fixture(scope='module')
def photos():
    "Two of scikit-image's photos and a page of text, 1024 pixels wide."
    skimage = pytest.importorskip('skimage')
    folder = Path(skimage.__file__).parent/'data'
    return {n: Image.open(folder/f'{n}.png').convert('RGB').resize((1024, 768), Image.Resampling.LANCZOS) for n in ('astronaut', 'coffee', 'page')}


@pytest.mark.parametrize('enlarge', [False, True])
def test_pixels_of_photos(photos, enlarge):
    "Tiles are what PIL's bicubic resizing gives; the global view is the float one, rounded."
    for im in photos.values():
        tiles, (rows, cols) = get_image_processor(1024, 256, enlarge)(encode(im, compress_level=1))
        want = torch.from_numpy(np.array(im.resize((cols*256, rows*256), Image.Resampling.BICUBIC))).permute(2, 0, 1)
        assert tiles[1:].equal(split_tiles(want, 256))
        view = F.interpolate(want[None].float(), size=(256, 256), mode='bilinear', antialias=True, align_corners=False)
        assert (tiles[:1] - view).abs().max() < .5 + 1e-3


def test_view_of_every_grid():
    "Grids up to 11 x 11, past the sums that fit 16 bits, on the brightest and on random pictures."
    for rows, cols in [(r, c) for r in (1, 2, 3, 5, 8, 9, 11) for c in (1, 4, 11)]:
        x = torch.randint(0, 256, (3, 8*rows, 8*cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
        view = F.interpolate(x[None].float(), size=(8, 8), mode='bilinear', antialias=True, align_corners=False)
        assert (global_view(x, 8) - view).abs().max() < .5 + 1e-3
        assert global_view(torch.full_like(x, 255), 8).eq(255).all()


def test_fields():
    "The processor is a value: equal by its fields, and they are checked."
    assert get_image_processor(64, 32) == ImageProcessor(64, 32, False, ()) != ImageProcessor(64, 32, True)
    assert hash(ImageProcessor(64, 32, custom_transforms=[flip])) == hash(ImageProcessor(64, 32, custom_transforms=(flip,)))
