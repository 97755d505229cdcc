"""Check the links inside a built site: every file and every anchor must exist.
usage: check_links.py _docs [ADDRESS]    ADDRESS: where the site is published; links to it are links inside the site"""
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    "Anchors and links of one HTML file."

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[k] for k in ('id', 'name') if attrs.get(k)}
        self.links += [attrs[k] for k in ('href', 'src') if attrs.get(k)]


def target_of(link: str, page: Path, root: Path, address: str) -> Path | None:
    "The file that a link means; None for a link that leaves the site."
    url, own = urlsplit(link), urlsplit(address.rstrip('/'))
    path = unquote(url.path)
    inside = own.netloc and (url.scheme, url.netloc) == (own.scheme, own.netloc) and f'{path}/'.startswith(f'{own.path}/')
    if (url.scheme or url.netloc) and not inside: return None
    if not path and not inside: return page
    if inside or path.startswith('/'):
        file = root/path.removeprefix(own.path).lstrip('/')
    else: file = page.parent/path
    return file/'index.html' if file.is_dir() else file


def broken_links(root: Path, address: str = '') -> list[str]:
    "One line for each link of the site that leads nowhere."
    pages = {p.resolve(): Page(p) for p in sorted(root.rglob('*.html'))}
    broken = []
    for page, content in pages.items():
        for link in content.links:
            file, anchor = target_of(link, page, root.resolve(), address), unquote(urlsplit(link).fragment)
            if file is None: continue
            file = file.resolve()
            if not file.exists():
                broken.append(f'{page.relative_to(root.resolve())}: no file for {link}')
            elif anchor and file in pages and anchor not in pages[file].anchors:
                broken.append(f'{page.relative_to(root.resolve())}: no anchor for {link}')
    return broken


if __name__ == '__main__':
    if len(sys.argv) < 2 or not list(Path(sys.argv[1]).rglob('*.html')):
        sys.exit('usage: check_links.py FOLDER_WITH_HTML [ADDRESS]')
    found = broken_links(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else '')
    print('\n'.join(found) or 'all links lead somewhere')
    sys.exit(bool(found))
