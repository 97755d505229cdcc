"""Finish the site that nbdev and Quarto have built: one signature for each function, links that work from any address.
usage: site.py _docs ADDRESS    ADDRESS: of the published site, whose pages are linked relatively from then on

nbdev links every name in backticks to the entry of that name. Where there is none (a private name, a method without
an entry of its own) or where several modules have one (`main`), the name is left, and the link goes."""
import html
import os
import re
import sys
from pathlib import Path

RAW = re.compile(r'\[`([^`\]<>]+)`\]\((https?://[^)\s"<>]+)\)')  # a link that nbdev has written into a comment of a signature
OWN = re.compile(r'(?<![\w\'"])__main__\.(?=[A-Za-z_])')  # of a type that the notebook itself defines
SIGNATURE = re.compile(r'<div class="sourceCode" id="[^"]+"><pre class="sourceCode python[^"]*">.*?</pre></div>\n?', re.S)
SOURCE = re.compile(r'<summary>Exported source</summary>\s*<div class="sourceCode cell-code".*?</pre></div>', re.S)
NAME = re.compile(r'<a href="([^"#]*)#([^"]+)"><code>([^<]*)</code></a>')  # a name that nbdev has linked
NESTED = re.compile(r'\[(<code>[^<]*</code>)\]\(https?://[^)\s"<>]+\)')  # the same in a sentence, inside a link of ours
AMBIGUOUS = ('main', 'logger')  # every module may have one
# what Quarto loads from another host for widgets, wherever an output is HTML, and for formulas of old browsers; no page needs it
WIDGETS = re.compile(r'<script src="https://cdnjs\.cloudflare\.com/[^>]*></script>|'
                     r'<script type="application/javascript">define\(\'jquery\'.*?</script>')
FONTS = re.compile(r'@import\s*(?:url\(\s*)?(?:"https?://[^"]*"|\'https?://[^\']*\'|https?://[^)]*)\s*\)?\s*;')  # of a style; the browser has its own
# what a browser loads when it shows a page, or a style, if it lies on another host
ELSEWHERE = re.compile(r'<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc="(?:https?:)?//([^/"]+)|'
                       r'<link\b(?=[^>]*\brel="(?:stylesheet|preload|icon)")[^>]*?\bhref="(?:https?:)?//([^/"]+)|'
                       r'(?:url\(\s*["\']?|@import\s*["\'])(?:https?:)?//([^/"\')]+)')
HEADING = re.compile(r'<h3 class="anchored" data-anchor-id="[^"]+">([^<]+)</h3>\s*\Z')


def text_of(markup: str) -> str:
    "What a reader sees of HTML."
    return html.unescape(re.sub(r'<[^>]+>', '', markup))


def one_signature(page: str) -> str:
    "Without signatures whose function or class stands in a source that the page shows."
    shown = '\n'.join(text_of(m[0]) for m in SOURCE.finditer(page))

    def kept(m: re.Match) -> str:
        heading = HEADING.search(page, max(0, m.start()-400), m.start())
        name = heading and re.escape(heading[1].rpartition('.')[2])
        return '' if name and re.search(rf'^\s*(def|class) {name}\b', shown, re.M) else m[0]

    return SIGNATURE.sub(kept, page)


def relative(page: str, name: str, address: str) -> str:
    "Links to the site's own address, as seen from the page of that name."
    def near(m: re.Match) -> str:
        target, _, anchor = m[1].partition('#')
        path = os.path.relpath(target or 'index.html', Path(name).parent).replace(os.sep, '/')
        return f'href="{path}{"#" + anchor if anchor else ""}"'

    return re.sub(rf'(?<=<a )href="{re.escape(address.rstrip("/"))}/?([^"]*)"', near,
        page)


def anchors(page: str) -> set[str]:
    "What can be linked to on a page."
    return set(re.findall(r'\bid="([^"]+)"', page))


def linked_names(page: str, name: str, known: dict[str, set[str]]) -> str:
    "Without links of names that no entry explains, or several do. `known`: page -> anchors."
    def kept(m: re.Match) -> str:
        if re.match(r'[a-z]+:', m[1]): return m[0]
        target = os.path.normpath(Path(name).parent/m[1]).replace(os.sep, '/') if m[1] else name
        found = m[2] in known.get(target, ())
        return m[0] if found and (m[3] not in AMBIGUOUS or target == name) else f'<code>{m[3]}</code>'

    return NAME.sub(kept, page)


def finish(page: str, name: str, address: str) -> str:
    "The text of one page without what stands twice, with links that are relative."
    page = RAW.sub(r'<a href="\2">\1</a>',
        OWN.sub('', one_signature(NESTED.sub(r'\1', WIDGETS.sub('', page)))))
    return relative(page, name, address)


def hosts(text: str) -> set[str]:
    "Other hosts that a browser asks for parts of a page or a style."
    return {host for found in ELSEWHERE.findall(text) for host in found if host}


def finish_styles(root: Path) -> None:
    "Styles without the fonts of other hosts."
    for style in root.rglob('*.css'):
        text = style.read_text(encoding='utf-8')
        if FONTS.search(text): style.write_text(FONTS.sub('', text), encoding='utf-8')


def finish_site(root: Path, address: str) -> None:
    "All pages of a folder, their styles, and the index of the search, in which there are no links; an error if another host is asked."
    finish_styles(root)
    pages = {p.relative_to(root).as_posix(): p for p in sorted(root.rglob('*.html'))}
    texts = {name: finish(p.read_text(encoding='utf-8'), name, address)
        for name, p in pages.items()}
    known = {name: anchors(text) for name, text in texts.items()}
    for name, text in texts.items():
        pages[name].write_text(linked_names(text, name, known), encoding='utf-8')
    files = [*pages.values(), *root.rglob('*.css')]
    asked = {str(f.relative_to(root)): found for f in files
        if (found := hosts(f.read_text(encoding='utf-8')))}
    if asked: raise SystemExit(f'a page asks another host: {asked}')
    if not (index := root/'search.json').exists(): return
    index.write_text(RAW.sub(r'\1', OWN.sub('', index.read_text(encoding='utf-8'))),
        encoding='utf-8')


if __name__ == '__main__':
    if len(sys.argv) != 3 or not list(Path(sys.argv[1]).rglob('*.html')):
        sys.exit('usage: site.py FOLDER_WITH_HTML ADDRESS')
    finish_site(Path(sys.argv[1]), sys.argv[2])
