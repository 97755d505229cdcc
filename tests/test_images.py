"Every kind of picture: what becomes of it, or why it is refused; pixels of the faster ways."

import io
import os
import pickle
import struct
import tracemalloc
import warnings
import zlib
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, PngImagePlugin, features

from nanovlm_nb.data.images import (
    UnreadableImage,
    get_image_processor,
    global_view,
    image_size,
    open_header,
    open_image,
    split_tiles,
)

pytestmark = pytest.mark.usefixtures('one_thread')

COLOURS = np.array(
    [[[230, 30, 30], [30, 200, 60]], [[40, 60, 220], [240, 220, 40]]], dtype=np.uint8
)
FOUR = Image.fromarray(COLOURS).resize((32, 32), Image.Resampling.NEAREST)
GREY = np.array([[10, 80], [160, 250]], dtype=np.uint8).repeat(16, 0).repeat(16, 1)


def encode(im, fmt='PNG', **kw) -> bytes:
    "A picture as a file."
    b = io.BytesIO()
    im.save(b, fmt, **kw)
    return b.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    "A chunk of a PNG."
    return (
        struct.pack('>I', len(data))
        + kind
        + data
        + struct.pack('>I', zlib.crc32(kind + data))
    )


def png(w, h, depth, colour, rows: bytes) -> bytes:
    "A PNG by hand: `rows` are bytes with a filter byte before each line."
    return (
        b'\x89PNG\r\n\x1a\n'
        + chunk(b'IHDR', struct.pack('>IIBBBBB', w, h, depth, colour, 0, 0, 0))
        + chunk(b'IDAT', zlib.compress(rows))
        + chunk(b'IEND', b'')
    )


def deep_rgb() -> bytes:
    "FOUR with 16 bits a colour; the lower byte is noise."
    wide = np.asarray(FOUR).astype('>u2') * 256 + np.random.default_rng(0).integers(
        0, 256, (32, 32, 3)
    ).astype('>u2')
    return png(
        32, 32, 16, 2, b''.join(b'\0' + line.astype('>u2').tobytes() for line in wide)
    )


def adobe(marker: bool) -> bytes:
    "A CMYK JPEG, inverted as Adobe does it, with Adobe's marker or without."
    b = encode(FOUR.convert('CMYK'), 'JPEG', quality=100, subsampling=0)
    at = b.index(b'\xff\xee')
    return (
        b
        if marker
        else b[:at] + b[at + 2 + struct.unpack('>H', b[at + 2 : at + 4])[0] :]
    )


def with_alpha(im, alpha=40):
    "The picture, nearly transparent."
    im = im.copy()
    im.putalpha(alpha)
    return im


def on_white(im, alpha):
    "A picture of which `alpha`, 0 to 255, one number or one for each pixel, is there; the rest is white."
    x = np.asarray(im)
    share = (
        np.reshape(alpha, (*np.shape(alpha), *[1] * (np.ndim(im) - np.ndim(alpha))))
        / 255
    )
    return share * x + (1 - share) * 255


FRAMES = dict(save_all=True, append_images=[FOUR.rotate(90), FOUR.rotate(180)])
QUARTERS = FOUR.convert('P', palette=Image.Palette.ADAPTIVE, colors=4)
DEEP = Image.fromarray(GREY.astype(np.uint16) * 257)
KINDS = (
    dict(  # name -> (file, what it should look like, largest difference)
        rgb=(encode(FOUR), FOUR, 0),
        bmp=(encode(FOUR, 'BMP'), FOUR, 0),
        ppm=(encode(FOUR, 'PPM'), FOUR, 0),
        tiff=(encode(FOUR, 'TIFF'), FOUR, 0),
        jpeg=(encode(FOUR, 'JPEG', quality=100, subsampling=0), FOUR, 8),
        webp=(encode(FOUR, 'WEBP', lossless=True), FOUR, 0),
        grey=(encode(Image.fromarray(GREY)), GREY, 0),
        bits=(encode(Image.fromarray(GREY > 100)), (GREY > 100) * np.uint8(255), 0),
        palette=(encode(QUARTERS), FOUR, 0),
        clear_palette=(
            encode(QUARTERS, transparency=bytes([0, 128, 255, 7])),
            on_white(FOUR, np.array([0, 128, 255, 7])[np.asarray(QUARTERS)]),
            1,
        ),
        one_clear_colour=(
            encode(FOUR, transparency=(230, 30, 30)),
            on_white(FOUR, 255 * (np.asarray(FOUR)[..., 0] != 230)),
            0,
        ),
        rgba=(encode(with_alpha(FOUR)), on_white(FOUR, 40), 1),
        rgba_webp=(
            encode(with_alpha(FOUR), 'WEBP', lossless=True),
            on_white(FOUR, 40),
            1,
        ),
        la=(encode(with_alpha(Image.fromarray(GREY))), on_white(GREY, 40), 1),
        deep_grey=(encode(DEEP), GREY, 0),
        deep_grey_tiff=(encode(DEEP, 'TIFF'), GREY, 0),
        deep_grey_clear=(
            encode(DEEP, transparency=80 * 257),
            on_white(GREY, 255 * (GREY != 80)),
            0,
        ),
        int_tiff=(
            encode(Image.fromarray(GREY.astype(np.int32) * 257), 'TIFF'),
            GREY,
            0,
        ),
        deep_rgb=(deep_rgb(), FOUR, 0),
        cmyk_tiff=(encode(FOUR.convert('CMYK'), 'TIFF'), FOUR, 0),
        cmyk_adobe=(adobe(True), FOUR, 8),
        cmyk_plain=(adobe(False), FOUR, 8),
        gif=(encode(FOUR, 'GIF'), FOUR, 0),
    )
    | {  # of several frames, the first
        f'moving_{fmt}': (
            encode(FOUR, fmt, **kw, **FRAMES),
            FOUR,
            8 if fmt == 'MPO' else 0,
        )
        for fmt, kw in (
            ('GIF', {}),
            ('WEBP', dict(lossless=True)),
            ('PNG', {}),
            ('TIFF', {}),
            ('MPO', dict(quality=100, subsampling=0)),
        )
    }
    | {'still_png': (encode(FOUR, default_image=True, **FRAMES), FOUR, 0)}
)
if features.check('avif'):
    KINDS['avif'] = (encode(FOUR, 'AVIF', quality=100, subsampling='4:4:4'), FOUR, 8)


@pytest.mark.parametrize('kind', KINDS)
def test_kind(kind):
    "Size from the header, RGB pixels, tiles; from bytes, from a file object and from a dictionary."
    b, want, tolerance = KINDS[kind]
    want = np.asarray(want)
    want = want if want.ndim == 3 else np.stack([want] * 3, -1)
    for src in (b, bytearray(b), io.BytesIO(b), dict(bytes=b, path='gone.png')):
        assert image_size(src) == (32, 32)
        got = open_image(src)
        assert (
            got.mode == 'RGB'
            and np.abs(np.asarray(got).astype(int) - want).max() <= tolerance
        )
    tiles, grid = get_image_processor(32, 16)(b)
    assert grid == (2, 2)
    assert (
        np.abs(
            tiles[1:].float().mean((2, 3)).numpy() - want[::16, ::16].reshape(4, 3)
        ).max()
        <= tolerance
    )


@pytest.mark.parametrize('mode', ['LA', 'RGBA', 'RGBa', 'PA'])
def test_hidden_colours(mode):
    "White shows, as in transformers since 5.23, and what is under a transparent place has no part in the result."
    noise = np.random.default_rng(0)
    mask = noise.integers(0, 256, (16, 16), dtype=np.uint8) * noise.integers(
        0, 2, (16, 16), dtype=np.uint8
    )
    seen, hidden = (
        noise.integers(0, 256, (16, 16, 3), dtype=np.uint8) for _ in range(2)
    )
    pictures = [
        Image.fromarray(np.dstack([np.where(mask[..., None], seen, under), mask]))
        for under in (seen, hidden)
    ]
    if mode == 'PA':
        pictures = [im.convert('RGB').quantize(8).convert('PA') for im in pictures[:1]]
    shown = [np.asarray(open_image(im.convert(mode))).astype(int) for im in pictures]
    white = Image.new('RGBA', (16, 16), 'white')
    for im, got in zip(pictures, shown):
        assert (
            np.abs(
                got
                - np.asarray(
                    Image.alpha_composite(
                        white, im.convert(mode).convert('RGBA')
                    ).convert('RGB')
                )
            ).max()
            == 0
            and np.abs(got - shown[0]).max() == 0
        )
    if mode != 'PA':
        assert (shown[0][mask == 0] == 255).all() and np.abs(
            shown[0] - np.asarray(pictures[0].convert('RGB'))
        ).max() > 100


def test_flags_turn_as_in_datasets():
    "XMP data counts, no flag is applied twice, and a number that is no orientation turns nothing."
    im = FOUR.resize((40, 24))
    info = PngImagePlugin.PngInfo()
    xmp = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    info.add_itxt('XML:com.adobe.xmp', xmp)
    exif = [Image.Exif() for _ in range(3)]
    for flag, value in zip(exif, (0, 9, 300)):
        flag[0x0112] = value
    for b in (
        encode(im, pnginfo=info),
        encode(im, 'WEBP', lossless=True, xmp=xmp.replace('6', '8').encode()),
        *(encode(im, exif=flag) for flag in exif),
    ):
        want = datasets.Image().decode_example(dict(bytes=b, path=None))
        once = open_image(b)
        assert image_size(b) == want.size
        for got in (once, open_image(once), open_image(open_image(once))):
            assert np.array_equal(np.asarray(got), np.asarray(want.convert('RGB')))


# --- refused


def claims(fmt: str, w: int, h: int) -> bytes:
    "A file of 32 x 32 pixels whose header says w x h."
    b = bytearray(
        KINDS[dict(PNG='rgb', JPEG='jpeg', GIF='gif', BMP='bmp', PPM='ppm')[fmt]][0]
    )
    if fmt == 'PNG':
        b[8:33] = chunk(b'IHDR', struct.pack('>II', w, h) + bytes(b[24:29]))
    if fmt == 'JPEG':
        at = b.index(b'\xff\xc0')
        b[at + 5 : at + 9] = struct.pack('>HH', h, w)
    if fmt == 'GIF':
        b[6:10] = struct.pack('<HH', w, h)
    if fmt == 'BMP':
        b[18:26] = struct.pack('<ii', w, h)
    return bytes(b).replace(b'32 32', f'{w} {h}'.encode()) if fmt == 'PPM' else bytes(b)


inner = KINDS['rgb'][
    0
]  # an icon of Apple's kind: its type says 128 x 128, the picture in it has 32 x 32
LYING = (
    b'icns'
    + struct.pack('>I', 16 + len(inner))
    + b'ic07'
    + struct.pack('>I', 8 + len(inner))
    + inner
)
BOMBS = {
    fmt: claims(fmt, 10_000, 10_000) for fmt in ('PNG', 'JPEG', 'GIF', 'BMP', 'PPM')
}
CLOSED = io.BytesIO(b'x')
CLOSED.close()
REFUSED = (
    dict(  # name -> (source, what the message says)
        empty=(b'', 'cannot identify'),
        nothing=(None, 'no picture'),
        number=(7, '7 is no picture'),
        a_list=([inner], 'no picture'),
        array=(np.asarray(FOUR), 'no picture'),
        address=('https://x.org/a.png', 'is an address'),
        no_data=('data:image/png;base64,AAAA', 'cannot identify'),
        empty_dict=({}, 'no picture'),
        dict_of_number=(dict(bytes=3), '3 is no picture'),
        no_file=(Path('nowhere/missing.png'), 'nowhere/missing.png'),
        no_name=('', ''),
        nul=('a\0b', 'null'),
        folder=(Path(__file__).parent, 'Is a directory'),
        this_file=(__file__, f"cannot identify image file '{__file__}'"),
        text_file=(io.StringIO('text'), 'ValueError'),
        closed=(CLOSED, 'closed'),
        no_pixels=(Image.new('RGB', (0, 5)), '0 x 5'),
        eps=(encode(FOUR, 'EPS'), 'Ghostscript'),
    )
    | {
        f'bomb_{fmt}': (b, '10000 x 10000 pixels, at most 89,478,485: scale')
        for fmt, b in BOMBS.items()
    }
    | {
        f'huge_{fmt}': (claims(fmt, 30_000, 30_000), 'DecompressionBombError')
        for fmt in BOMBS
    }
)


@pytest.mark.parametrize('name', REFUSED)
def test_refused(name):
    "From the header already: one kind of error, a message, no warning."
    src, message = REFUSED[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        for f in (open_header, image_size, open_image, get_image_processor(32, 16)):
            with pytest.raises(UnreadableImage) as e:
                f(src)
            assert (
                message in str(e.value)
                and ' at 0x' not in str(e.value)
                and type(pickle.loads(pickle.dumps(e.value))) is UnreadableImage
            )
    assert not [w for w in seen if 'ecompression' in str(w.message)]


@pytest.mark.filterwarnings('ignore::UserWarning:PIL')
@pytest.mark.parametrize('kind', [k for k in KINDS if k != 'still_png'])
def test_truncated(kind):
    "Half a file has a size or none, and no pixels. (Half an APNG may hold its whole first frame.)"
    b = KINDS[kind][0]
    half = b[:60] if 'moving' in kind else b[: len(b) // 2]
    try:
        assert image_size(half) == (32, 32)
    except UnreadableImage:
        pass
    for f in (open_image, get_image_processor(32, 16)):
        with pytest.raises(UnreadableImage):
            f(half)


def test_pixels_tell():
    "What only the pixels show: floating point, and a size other than the header's."
    floats = encode(Image.fromarray(np.ones((4, 4), np.float32)), 'TIFF')
    assert image_size(floats) == (4, 4)
    with pytest.raises(UnreadableImage, match='mode F'):
        open_image(floats)
    assert image_size(LYING) == (128, 128)
    with pytest.raises(
        UnreadableImage,
        match=r'header says \(128, 128\).* \(32, 32\) pixels|allowed sizes',
    ):
        open_image(LYING)


# --- pixels


@pytest.fixture(scope='module')
def photos():
    "Two of scikit-image's photos and a page of text, 1024 pixels wide."
    skimage = pytest.importorskip('skimage')
    folder = Path(skimage.__file__).parent / 'data'
    return {
        n: Image.open(folder / f'{n}.png')
        .convert('RGB')
        .resize((1024, 768), Image.Resampling.LANCZOS)
        for n in ('astronaut', 'coffee', 'page')
    }


@pytest.mark.parametrize('enlarge', [False, True])
def test_pixels_of_photos(photos, enlarge):
    "Tiles are what PIL's bicubic resizing gives; the global view is the float one, rounded."
    for im in photos.values():
        tiles, (rows, cols) = get_image_processor(1024, 256, enlarge)(
            encode(im, compress_level=1)
        )
        want = torch.from_numpy(
            np.array(im.resize((cols * 256, rows * 256), Image.Resampling.BICUBIC))
        ).permute(2, 0, 1)
        assert tiles[1:].equal(split_tiles(want, 256))
        view = F.interpolate(
            want[None].float(),
            size=(256, 256),
            mode='bilinear',
            antialias=True,
            align_corners=False,
        )
        assert (tiles[:1] - view).abs().max() < 0.5 + 1e-3


def test_view_of_every_grid():
    "Grids up to 11 x 11, past the sums that fit 16 bits, on the brightest and on random pictures."
    for rows, cols in [(r, c) for r in (1, 2, 3, 5, 8, 9, 11) for c in (1, 4, 11)]:
        x = torch.randint(
            0,
            256,
            (3, 8 * rows, 8 * cols),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(rows),
        )
        view = F.interpolate(
            x[None].float(),
            size=(8, 8),
            mode='bilinear',
            antialias=True,
            align_corners=False,
        )
        assert (global_view(x, 8) - view).abs().max() < 0.5 + 1e-3
        assert global_view(torch.full_like(x, 255), 8).eq(255).all()


# --- what is no picture, and what costs more than it should

NO_PICTURES = dict(  # first bytes -> what the message says
    heic=(b'\0\0\0\x18ftypheic\0\0\0\0mif1heic', 'HEIC picture: convert'),
    video=(b'\0\0\0\x18ftypmp42' + b'x' * 99, 'a video'),
    pdf=(b'%PDF-1.7\n', 'a PDF'),
    page=(b'\n<!DOCTYPE html><html>', 'a web page'),
    json=(b'{"error": "rate limit"}', 'rate limit'),
    lfs=(b'version https://git-lfs.github.com/spec/v1\n', 'git lfs pull'),
    gzip=(b'\x1f\x8b\x08', 'unpack'),
    zip=(b'PK\3\4', 'unpack'),
    svg=(b'<?xml version="1.0"?><svg/>', 'SVG'),
    dicom=(b'\0' * 128 + b'DICM', 'DICOM'),
    zeros=(b'\0' * 99, 'zeros'),
    empty=(b'', 'empty'),
    noise=(bytes(range(128, 160)), 'unknown, 80 81'),
)


@pytest.mark.parametrize('name', NO_PICTURES)
def test_the_first_bytes_tell(tmp_path, name):
    head, said = NO_PICTURES[name]
    (file := tmp_path / 'a.jpg').write_bytes(head)
    for src in (head, str(file), file):
        with pytest.raises(UnreadableImage) as e:
            image_size(src)
        assert said in str(e.value).partition('; it is ')[2]


def test_a_pipe_is_no_picture(tmp_path):
    "To open it would wait for somebody to write."
    os.mkfifo(pipe := tmp_path / 'a.png')
    for src in (pipe, str(pipe), dict(bytes=None, path=str(pipe)), '/dev/zero'):
        for f in (image_size, open_image):
            with pytest.raises(UnreadableImage, match='pipe or a device'):
                f(src)


@pytest.mark.parametrize('kind', [b'tEXt', b'zTXt', b'iTXt', b'iCCP'])
def test_long_texts_of_a_png_are_not_read(tmp_path, kind):
    "30 MB of text, before the pixels and behind them, cost their file at most; the flag in a text still turns the picture."
    words = b'word ' * 6_000_000
    packed = zlib.compress(words)
    body = dict(
        tEXt=b'page\0' + words,
        zTXt=b'page\0\0' + packed,
        iTXt=b'page\0\1\0\0\0' + packed,
        iCCP=b'page\0\0' + packed + bytes(40_000),
    )[kind.decode()]
    info = PngImagePlugin.PngInfo()
    info.add_itxt(
        'XML:com.adobe.xmp',
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>',
    )
    plain = encode(FOUR.resize((40, 24)), pnginfo=info)
    at = plain.index(b'IDAT') - 4
    full = (
        plain[:at]
        + chunk(kind, body)
        + plain[at:-12]
        + (chunk(kind, body) if kind != b'iCCP' else b'')
        + plain[-12:]
    )
    (file := tmp_path / 'a.png').write_bytes(full)
    tracemalloc.start()
    for src in (full, file):
        assert image_size(src) == (24, 40) and np.array_equal(
            np.asarray(open_image(src)), np.asarray(open_image(plain))
        )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(full) + 2**20 and not open_header(full).info.keys() & {
        'page',
        'icc_profile',
    }


def test_no_open_file_is_closed():
    "A number is no picture, though a file may have it."
    with open(__file__) as f:
        with pytest.raises(UnreadableImage, match='is no picture'):
            image_size(f.fileno())
        assert f.read(1)
