"The site: what is mended after Quarto has rendered it, links, and the pages that run elsewhere."

import ast
import configparser
import json
import re
import subprocess
from pathlib import Path

import pytest
from test_docs import COURSE, NOTEBOOKS, ROOT, by_name, cells, script

ADDRESS = 'https://nanovlm-nb.github.io/nanovlm_nb'


# --- what Quarto and nbdev warn about


@by_name
def test_cells_import_or_compute(notebook):
    "nbdev runs cells with imports for the site; one that computes as well is run there too, and it warns."
    for c in cells(notebook, 'code'):
        if re.match(r'#\| ?(exports?|default_exp)\b', c['source']) or re.search(
            r'^#\| ?eval: false', c['source'], re.M
        ):
            continue
        nodes = list(
            ast.walk(ast.parse(re.sub(r'^[%!].*$', '', c['source'], flags=re.M)))
        )
        imports = any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in nodes)
        assert not (
            imports and any(isinstance(n, (ast.Expr, ast.Assign)) for n in nodes)
        ), f'split cell {c["id"]}: imports, and what it computes'


# --- after rendering


def test_links_are_relative_and_lead_to_an_entry(tmp_path):
    "A preview and a fork work; a private name, a method without an entry and a name that several modules have are no links."
    link = '<a href="{}/b.html#{}"><code>{}</code></a>'.format
    (tmp_path / 'sub').mkdir()
    (tmp_path / 'b.html').write_text(
        '<p id="pack"></p><p id="main"></p>' + link(ADDRESS, 'main', 'main')
    )
    (tmp_path / 'sub' / 'a.html').write_text(
        f'<link rel="canonical" href="{ADDRESS}/sub/a.html"><a href="{ADDRESS}">home</a><a href="https://x.org/b.html">x</a>'
        + link(ADDRESS, 'pack', 'pack')
        + link(ADDRESS, '_items', '_items')
        + link(ADDRESS, 'main', 'main')
    )
    (tmp_path / 'index.html').write_text('<a href="sub/a.html"></a>')
    (tmp_path / 'search.json').write_text(
        f'"As [`pack`]({ADDRESS}/b.html#pack) makes __main__.Batch"'
    )
    links = script('check_links').broken_links
    assert links(tmp_path, ADDRESS) == [
        f'sub/a.html: no anchor for {ADDRESS}/b.html#_items'
    ]
    script('site').finish_site(tmp_path, ADDRESS)
    assert (tmp_path / 'sub' / 'a.html').read_text() == (
        f'<link rel="canonical" href="{ADDRESS}/sub/a.html"><a href="../index.html">home</a><a href="https://x.org/b.html">x</a>'
        '<a href="../b.html#pack"><code>pack</code></a><code>_items</code><code>main</code>'
    )
    assert (
        '<a href="b.html#main"><code>main</code></a>'
        in (tmp_path / 'b.html').read_text()
    )
    assert (tmp_path / 'search.json').read_text() == '"As pack makes Batch"'
    assert links(tmp_path, ADDRESS) == []


def test_no_page_asks_another_host(tmp_path):
    "Scripts and fonts that Quarto takes from elsewhere go; what stays and asks another host is an error that names it. A link may lead anywhere."
    finish = script('site').finish_site
    polyfill = '<script src="https://cdnjs.cloudflare.com/polyfill/v3/polyfill.min.js?features=es6"></script>'
    link = f'<a href="https://x.org/"><code>x</code></a><p>a <a href="b.html">[<code>check_known</code>]({ADDRESS}/b.html#check_known)</a>'
    style = tmp_path / 'own.css'
    page = tmp_path / 'a.html'
    style.write_text(
        '@import"https://fonts.googleapis.com/css2?family=Source+Sans+Pro:wght@300;400;700&display=swap";@import url(https://fonts.x.org/a.css);p{color:red}'
    )
    page.write_text(f'<link rel="stylesheet" href="own.css">{polyfill}{link}')
    finish(tmp_path, ADDRESS)
    assert style.read_text() == 'p{color:red}'
    assert (
        page.read_text()
        == '<link rel="stylesheet" href="own.css"><a href="https://x.org/"><code>x</code></a><p>a <a href="b.html"><code>check_known</code></a>'
    )
    for part in (
        '<script async src="https://cdn.x.org/m.js"></script>',
        '<link href="//cdn.x.org/m.css" rel="stylesheet">',
        '<img alt="" src="http://cdn.x.org/m.png">',
        '<style>p{background:url("https://cdn.x.org/m.png")}</style>',
    ):
        page.write_text(part)
        with pytest.raises(SystemExit, match=re.escape("{'a.html': {'cdn.x.org'}}")):
            finish(tmp_path, ADDRESS)


def test_settings_are_a_page_of_tables():
    "No cell of the page shows its program: the tables are what is read."
    assert all(
        c['source'].startswith(('#| echo: false\n', '#| hide\n'))
        for c in cells(ROOT / 'nbs' / 'tutorials' / 'settings.ipynb', 'code')
    )


# --- one click to run a page

RUNNABLE = [
    p
    for p in NOTEBOOKS
    if (p.parent.name == 'tutorials' or p.name in COURSE) and cells(p, 'code')
]


def test_pages_of_course_and_tutorials_open_and_install_in_colab_and_kaggle():
    """The links above the introduction name the page itself, as it is committed, on the branch that is published. The first cell does nothing elsewhere:
    the package comes from that branch, with what the tests of its cells need; a file that a page reads comes with it."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / 'settings.ini', encoding='utf-8')
    own = settings['DEFAULT']
    repository, branch, where = (
        f'{own["user"]}/{own["repo"]}',
        own['branch'],
        '!if [ "$COLAB_RELEASE_TAG$KAGGLE_KERNEL_RUN_TYPE" ]; then ',
    )
    committed = subprocess.run(
        ['git', 'ls-files', 'nbs'], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(RUNNABLE) > 28
    for notebook in RUNNABLE:
        page = notebook.relative_to(ROOT).as_posix()
        code = cells(notebook, 'code')
        at = f'{repository}/blob/{branch}/{page}'
        first = ''.join(
            json.loads(notebook.read_text(encoding='utf-8'))['cells'][1]['source']
        ).splitlines()[0]
        assert first == (
            f'[Open in Colab](https://colab.research.google.com/github/{at}) '
            f'[Open in Kaggle](https://kaggle.com/kernels/welcome?src=https://github.com/{at})'
        ), page
        assert page in committed
        read = sorted(
            {
                m
                for c in code
                for m in re.findall(r"'(?:\.\./)+(tests/[^']+)'", c['source'])
            }
        )
        wanted = [
            f'pip install -q "nanovlm_nb[test] @ git+{own["git_url"]}@{branch}"',
            *(
                f'wget -qP ../{Path(f).parent} https://raw.githubusercontent.com/{repository}/{branch}/{f}'
                for f in read
            ),
        ]
        assert code[0]['source'].split('\n!')[1:] == [
            f'{where}{w}; fi'[1:] for w in wanted
        ], page
