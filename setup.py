"All metadata is in settings.ini; this file hands it to setuptools."
import shlex
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
config = ConfigParser(delimiters=['='])
config.read(here/'settings.ini', encoding='utf-8')
cfg = config['DEFAULT']
lib = cfg['lib_name']

setup(
    name=lib, version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'].split(),
    long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'], license='Apache-2.0',
    package_dir={'': '.'}, # installed in place it is a folder on the path: a checkout beside a notebook does not hide it
    packages=[*find_packages(include=[lib, f'{lib}.*']), f'{lib}.tasks', f'{lib}.uses.page'], include_package_data=True, package_data={lib: ['py.typed', 'tasks/*', '*.mplstyle', 'uses/page/*']}, python_requires='>=' + cfg['min_python'],
    install_requires=shlex.split(cfg['requirements']),
    extras_require={extra: shlex.split(cfg[f'{extra}_requirements']) for extra in ('dev', 'test', 'notebooks', 'demo', 'onnx', 'gguf', 'lora', 'tensorboard', 'eval')},
    entry_points={'console_scripts': shlex.split(cfg['console_scripts']), 'nbdev': [f'{lib}={lib}._modidx:d'], 'lmms_eval.models': [f'{lib}={lib}.answers.tasks:manifest']},
)
