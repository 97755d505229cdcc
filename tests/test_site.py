"The site: figures, what is mended after Quarto has rendered it, links, its configuration and how it is published."
import ast
import base64
import configparser
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from test_docs import COURSE, NBS, NOTEBOOKS, ROOT, by_name, cells, script

ADDRESS = 'https://nanovlm-nb.github.io/nanovlm_nb'
NARROWEST = 500  # pixels of the page


def pictures(cell: dict) -> list[tuple[Image.Image, int]]:
    "Saved pictures of a cell, and how many pixels of a page each is wide."
    found = []
    for o in cell['outputs']:
        if 'image/png' not in o.get('data', {}): continue
        picture = Image.open(io.BytesIO(base64.b64decode(''.join(o['data']['image/png']))))
        found.append((picture, o['metadata'].get('image/png', {}).get('width', picture.width)))
    return found


# --- figures

@by_name
def test_figures_are_wide_enough_to_be_read(notebook):
    narrow = {(notebook.stem, c['id']) for c in cells(notebook, 'code') for _, width in pictures(c) if width < NARROWEST}
    assert not narrow, f'narrower than {NARROWEST} pixels: {narrow}; leave out figsize and dpi, see nanovlm_nb/figures.mplstyle'


@by_name
def test_all_figures_have_one_style(notebook):
    "Notebooks that draw choose the style sheet, once; size and text are its, not those of a cell."
    source = '\n'.join(c['source'] for c in cells(notebook, 'code') if not re.match(r'#\| ?exports?\b', c['source']))
    if not re.search(r'plt\.(subplots|figure)\(', source): return
    assert source.count("style.use('nanovlm_nb.figures')") == 1
    own = re.findall(r'dpi=\d+|fontsize=\d|labelsize=\d|set_fontsize|rcParams\[.*\] *=|set_matplotlib_formats', source)
    assert not own, own


@by_name
def test_texts_of_figures_can_be_an_address(notebook):
    "Quarto reads the text as an address too, in which a per cent sign begins a code, and warns."
    assert not [c['id'] for c in cells(notebook, 'code') if re.search(r'^#\| fig-alt: .*%', c['source'], re.M)]


def test_small_figures_look_the_same(tmp_path):
    "A palette keeps the colour of every area; a photograph, which it would change, stays as it is."
    figures = script('figures')
    chart = Image.new('RGB', (400, 200), 'white')
    for k, colour in enumerate(((0, 114, 178), (23, 149, 168), (217, 119, 6))): chart.paste(colour, (100*k, 50, 100*k+80, 180))
    chart.resize((401, 201), Image.Resampling.BILINEAR).save(before := io.BytesIO(), 'PNG', compress_level=0)
    after = Image.open(io.BytesIO(figures.smaller(before.getvalue())))
    assert after.mode == 'P' and after.size == (401, 201)
    for k, colour in enumerate(((0, 114, 178), (23, 149, 168), (217, 119, 6))):
        assert np.abs(np.array(after.convert('RGB').getpixel((100*k+40, 100))) - colour).max() <= figures.FLAT
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    photo.save(before := io.BytesIO(), 'PNG')
    assert np.array_equal(Image.open(io.BytesIO(figures.smaller(before.getvalue()))), photo)
    clear = Image.new('RGBA', (8, 8), (0, 0, 0, 0))
    clear.save(before := io.BytesIO(), 'PNG', compress_level=0)
    assert Image.open(io.BytesIO(figures.smaller(before.getvalue()))).convert('RGB').getpixel((0, 0)) == (255, 255, 255)


# --- what Quarto and nbdev warn about

@by_name
def test_cells_import_or_compute(notebook):
    "nbdev runs cells with imports for the site; one that computes as well is run there too, and it warns."
    for c in cells(notebook, 'code'):
        if re.match(r'#\| ?(exports?|default_exp)\b', c['source']) or 'nbdev_export()' in c['source'] or re.search(r'^#\| ?eval: false', c['source'], re.M): continue
        nodes = list(ast.walk(ast.parse(re.sub(r'^[%!].*$', '', c['source'], flags=re.M))))
        imports = any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in nodes)
        assert not (imports and any(isinstance(n, (ast.Expr, ast.Assign)) for n in nodes)), f'split cell {c["id"]}: imports, and what it computes'


# --- after rendering

def signature(name: str) -> str:
    "As `show_doc` and Quarto write it."
    return ('<div class="sourceCode" id="cb1"><pre class="sourceCode python code-with-copy"><code class="sourceCode python"><span id="cb1-1"><span class="kw">def</span> '
            f'{name}(x:__main__.Batch <span class="co"># As [`pack`]({ADDRESS}/data.packing.html#pack) makes it</span>)</span></code></pre></div>\n')


def heading(name: str) -> str: return f'<section id="{name.lower()}"><h3 class="anchored" data-anchor-id="{name.lower()}">{name}</h3>\n'


def source(text: str) -> str:
    "Open source of a cell."
    return f'<summary>Exported source</summary>\n<div class="sourceCode cell-code" id="cb2"><pre class="sourceCode python"><code><span>{text}</span></code></pre></div>'


def test_a_signature_stands_once():
    "Where the source is shown, the signature above it goes, of functions, classes, and the second definition of a cell; else it stays."
    site = script('site')
    shown = source('<span class="kw">def</span> first(x):\n    pass\n<span class="kw">class</span> Second:\n    <span class="kw">def</span> third(self): pass')
    page = ''.join(heading(n) + signature(n) for n in ('first', 'Second.third', 'hidden')) + shown + heading('Second') + signature('Second')
    done = site.finish(page, 'data.packing.html', ADDRESS)
    assert [n for n in ('first', 'third', 'Second', 'hidden') if f'{n}(x:' in site.text_of(done)] == ['hidden']
    assert all(heading(n) in done for n in ('first', 'Second.third', 'hidden', 'Second')) and shown in done


def test_signatures_have_no_raw_links_and_no_main_and_pages_no_scripts_for_widgets():
    site = script('site')
    foreign = '<script src="https://cdnjs.cloudflare.com/ajax/libs/require.js/2/require.min.js"></script><script type="application/javascript">define(\'jquery\', [])</script>'
    done = site.finish(foreign + heading('hidden') + signature('hidden') + "<code>assertLogs('__main__')</code>", 'tutorials/a.html', ADDRESS)
    assert '<script' not in done and '[`' not in done and 'x:Batch' in site.text_of(done) and "assertLogs('__main__')" in done
    assert '# As <a href="../data.packing.html#pack">pack</a> makes it' in done


def test_links_are_relative_and_lead_to_an_entry(tmp_path):
    "A preview and a fork work; a private name, a method without an entry and a name that several modules have are no links."
    link = '<a href="{}/b.html#{}"><code>{}</code></a>'.format
    (tmp_path/'sub').mkdir()
    (tmp_path/'b.html').write_text('<p id="pack"></p><p id="main"></p>' + link(ADDRESS, 'main', 'main'))
    (tmp_path/'sub'/'a.html').write_text(f'<link rel="canonical" href="{ADDRESS}/sub/a.html"><a href="{ADDRESS}">home</a><a href="https://x.org/b.html">x</a>'
                                         + link(ADDRESS, 'pack', 'pack') + link(ADDRESS, '_items', '_items') + link(ADDRESS, 'main', 'main'))
    (tmp_path/'index.html').write_text('<a href="sub/a.html"></a>')
    (tmp_path/'search.json').write_text(f'"As [`pack`]({ADDRESS}/b.html#pack) makes __main__.Batch"')
    links = script('check_links').broken_links
    assert links(tmp_path, ADDRESS) == [f'sub/a.html: no anchor for {ADDRESS}/b.html#_items']
    script('site').finish_site(tmp_path, ADDRESS)
    assert (tmp_path/'sub'/'a.html').read_text() == (f'<link rel="canonical" href="{ADDRESS}/sub/a.html"><a href="../index.html">home</a><a href="https://x.org/b.html">x</a>'
                                                     '<a href="../b.html#pack"><code>pack</code></a><code>_items</code><code>main</code>')
    assert '<a href="b.html#main"><code>main</code></a>' in (tmp_path/'b.html').read_text()
    assert (tmp_path/'search.json').read_text() == '"As pack makes Batch"'
    assert links(tmp_path, ADDRESS) == []


# --- configuration

def site() -> dict: return yaml.safe_load((ROOT/'_quarto.yml').read_text(encoding='utf-8'))


def test_code_has_room():
    "110 characters of 13 pixels (7.83 wide each) fit in the column; on a phone lines are wrapped."
    grid = site()['format']['html']['grid']
    assert int(grid['body-width'].removesuffix('px')) >= 110*7.83 + 60
    css = (NBS/'styles.css').read_text(encoding='utf-8')
    assert re.search(r'div\.sourceCode pre code[^}]*font-size: 13px', css)
    assert re.search(r'@media \(max-width: 767px\) \{[^@]*div\.sourceCode pre[^}]*white-space: pre-wrap', css)
    assert re.search(r':not\(pre\) > code \{[^}]*overflow-wrap: anywhere', css) and re.search(r'table \{[^}]*overflow-x: auto', css)


def test_the_site_follows_the_reader_and_is_recognised():
    config = site()
    assert config['format']['html']['respect-user-color-scheme'] and config['format']['html']['code-copy'] is True
    web = config['website']
    assert (NBS/web['favicon']).read_text(encoding='utf-8').startswith('<svg')
    assert web['open-graph']['image'] == web['twitter-card']['image'] == 'preview.png' and Image.open(NBS/'preview.png').size == (1200, 630)
    assert 'source' in web['repo-actions'] and web['repo-subdir'] == 'nbs'
    assert web['sidebar']['collapse-level'] == 1
    tutorials = next(part['contents'] for part in web['sidebar']['contents'] if isinstance(part, dict) and part.get('section') == 'Tutorials')
    assert tutorials[0] == 'tutorials/first_run.ipynb' and sorted(tutorials) == sorted(f'tutorials/{p.name}' for p in (NBS/'tutorials').glob('*.ipynb'))


def test_changelog_and_contributing_are_pages():
    for name in ('changelog', 'contributing'):
        text = (NBS/f'{name}.qmd').read_text(encoding='utf-8')
        included = re.search(r'include (\S+) >', text)[1]
        assert (NBS/included).read_text(encoding='utf-8').startswith('# ')
        assert f'{name}.qmd' in (ROOT/'_quarto.yml').read_text(encoding='utf-8')


def test_nbdev_leaves_the_readme_alone(tmp_path):
    "`nbdev_docs` would write README.md from a notebook; there is none of that name."
    settings = configparser.ConfigParser()
    settings.read(ROOT/'settings.ini', encoding='utf-8')
    (tmp_path/'nbs').mkdir()
    (tmp_path/'nbs'/'index.ipynb').write_text((NBS/'index.ipynb').read_text(encoding='utf-8'), encoding='utf-8')
    (tmp_path/'settings.ini').write_text((ROOT/'settings.ini').read_text(encoding='utf-8'), encoding='utf-8')
    assert not (NBS/settings['DEFAULT']['readme_nb']).exists()
    code = 'from nbdev import quarto; quarto.nbdev_readme.__wrapped__(chk_time=True)'
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and 'Could not find' in done.stdout, done.stderr[-500:]
    assert not (tmp_path/'README.md').exists()


@pytest.mark.parametrize('path', sorted((ROOT/'.github'/'workflows').glob('*.y*ml')), ids=lambda p: p.stem)
def test_workflows_are_pinned_and_may_little(path):
    "Actions by commit, so that nobody changes them behind us; the token may read, and only the job that publishes may publish."
    text = path.read_text(encoding='utf-8')
    assert not [u for u in re.findall(r'uses: *(\S+)', text) if not re.fullmatch(r'[\w./-]+@[0-9a-f]{40}', u)]
    config = yaml.safe_load(text)
    assert config['permissions'] == {'contents': 'read'}
    assert {name: job['permissions'] for name, job in config['jobs'].items() if 'permissions' in job} == ({'deploy': {'pages': 'write', 'id-token': 'write'}} if path.stem == 'docs' else {})
    for step in (s for job in config['jobs'].values() for s in job['steps'] if 'checkout' in s.get('uses', '')): assert step['with']['persist-credentials'] is False


def test_patterns_of_the_sidebar_mean_one_folder():
    "A pattern without a leading slash finds notebooks of that name in every folder, and one with `?` behind a folder none."
    patterns = [p for part in site()['website']['sidebar']['contents'] if 'contents' in part
                for p in ([part['contents']] if isinstance(part['contents'], str) else part['contents']) if '*' in p]
    assert patterns and all(p.startswith('/') or p.endswith('/*.ipynb') for p in patterns), patterns


# --- one click to run a page

RUNNABLE = [p for p in NOTEBOOKS if (p.parent.name == 'tutorials' or p.name in COURSE) and cells(p, 'code')]


def published() -> tuple[str, str, str]:
    "The repository as user/name, its branch and its address, from settings.ini."
    settings = configparser.ConfigParser()
    settings.read(ROOT/'settings.ini', encoding='utf-8')
    own = settings['DEFAULT']
    return f'{own["user"]}/{own["repo"]}', own['branch'], own['git_url']


def test_pages_of_course_and_tutorials_open_in_colab_and_kaggle():
    "The links above the introduction name the page itself, as it is committed, on the branch that is published."
    repository, branch, _ = published()
    committed = subprocess.run(['git', 'ls-files', 'nbs'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(RUNNABLE) > 28
    for notebook in RUNNABLE:
        page = notebook.relative_to(ROOT).as_posix()
        at = f'{repository}/blob/{branch}/{page}'
        first = ''.join(json.loads(notebook.read_text(encoding='utf-8'))['cells'][1]['source']).splitlines()[0]
        assert first == (f'[Open in Colab](https://colab.research.google.com/github/{at}) '
                         f'[Open in Kaggle](https://kaggle.com/kernels/welcome?src=https://github.com/{at})'), page
        assert page in committed


def install_commands(notebook: Path) -> list[str]:
    "The shell commands of a page's first code cell."
    first = cells(notebook, 'code')[0]['source']
    assert first.startswith('#| hide\n# on Colab and Kaggle: the package; elsewhere nothing\n'), notebook.name
    return [line.removeprefix('!') for line in first.splitlines()[2:]]


def called(commands: list[str], folder: Path, **where: str) -> list[str]:
    "Which programs the commands start there, with their arguments; those that would load something only write down that they were started."
    for name in ('pip', 'wget'):
        (folder/name).write_text(f'#!/bin/sh\necho {name} "$@" >> "{folder}/called"\n')
        (folder/name).chmod(0o755)
    (folder/'called').write_text('')
    for command in commands:
        done = subprocess.run(['sh', '-c', command], env={'PATH': f'{folder}:/usr/bin:/bin', **where}, cwd=folder, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
    return (folder/'called').read_text().splitlines()


def test_the_first_cell_installs_on_colab_and_kaggle_and_does_nothing_elsewhere(tmp_path):
    "The package comes from the published branch, with what the tests of its cells need; a file that a page reads comes with it."
    repository, branch, address = published()
    pip = f'pip install -q nanovlm_nb[test] @ git+{address}@{branch}'
    different = {tuple(install_commands(p)): p for p in RUNNABLE}
    for commands, notebook in different.items():
        assert called(commands, tmp_path) == []
        on_colab = called(commands, tmp_path, COLAB_RELEASE_TAG='release-colab_20250101')
        assert on_colab == called(commands, tmp_path, KAGGLE_KERNEL_RUN_TYPE='Interactive') and on_colab[0] == pip
        for line in on_colab[1:]:
            folder, file = re.fullmatch(rf'wget -qP (\S+) https://raw.githubusercontent.com/{repository}/{branch}/(\S+)', line).groups()
            assert (notebook.parent/folder/Path(file).name).resolve() == (ROOT/file).resolve() and (ROOT/file).is_file()
    for notebook in RUNNABLE:
        read = {m for c in cells(notebook, 'code') for m in re.findall(r"'(?:\.\./)+(tests/[^']+)'", c['source'])}
        assert all(any(file in command for command in install_commands(notebook)) for file in read), notebook.name


@pytest.mark.parametrize('name', ['CHANGELOG.md', 'CONTRIBUTING.md'])
def test_a_file_of_the_checkout_that_is_a_page_too_has_no_link_into_the_checkout(name):
    "The page is in another folder than the file, so such a link leads nowhere."
    links = re.findall(r'\]\(([^)\s]+)\)', (ROOT/name).read_text(encoding='utf-8'))
    assert not [link for link in links if not link.startswith(('https://', '#'))]
