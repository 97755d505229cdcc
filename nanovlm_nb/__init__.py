"""A vision-language-model trainer that is read as a book and run as a program: the names below, each imported when it is asked for."""
# Written by hand; `nbdev_export` changes the version only.
__version__ = "0.1.0"

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING: # what editors and type checkers see
    from .answers.answer import Asker as Asker
    from .api import evaluate as evaluate, export as export, load as load, train as train
    from .core.config import TrainConfig as TrainConfig, VLMConfig as VLMConfig, preset as preset
    from .core.logs import plot_curves as plot_curves
    from .core.run_dir import read_log as read_log
    from .model.vlm import VisionLanguageModel as VisionLanguageModel
    from .runs.run import run as run
    from .training.trainer import Hook as Hook

_WHERE = dict(train='api', load='api', evaluate='api', export='api', run='runs.run', preset='core.config', VLMConfig='core.config',
    TrainConfig='core.config', VisionLanguageModel='model.vlm', Asker='answers.answer', Hook='training.trainer',
    plot_curves='core.logs', read_log='core.run_dir')
__all__ = list(_WHERE)

def __getattr__(name):
    if name not in _WHERE: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    try: return getattr(import_module(f'.{_WHERE[name]}', __name__), name)
    except AttributeError as e: raise ImportError(f'{__name__}.{name} cannot be imported: {e}', name=name) from e # python would hide it

def __dir__(): return sorted(__all__)

class _Package(ModuleType):
    "Keeps `train` the function, also when the module of the script, `nanovlm_nb.train`, has been imported."
    train = property(lambda self: __getattr__('train'), lambda self, module: None)

sys.modules[__name__].__class__ = _Package
