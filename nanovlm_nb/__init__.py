"""A vision-language-model trainer that is read as a book and run as a program: the names below, each imported when it is asked for."""
# Written by hand; `nbdev_export` changes the version only.
__version__ = "0.1.0"

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING: # what editors and type checkers see
    from .answers.answer import Asker as Asker
    from .answers.look import exact_match as exact_match
    from .api import evaluate as evaluate,export as export,load as load,train as train
    from .compat.nanovlm import ConstantLengthDataset as ConstantLengthDataset
    from .compat.nanovlm import VQACollator as VQACollator
    from .compat.padded import VLMDataset as VLMDataset
    from .core.config import TrainConfig as TrainConfig,VLMConfig as VLMConfig
    from .core.config import get_run_name as get_run_name
    from .core.config import preset as preset
    from .core.dist import destroy_dist as destroy_dist,dist_gather as dist_gather
    from .core.dist import dist_mean_scalar as dist_mean_scalar,get_rank as get_rank
    from .core.dist import get_world_size as get_world_size,init_dist as init_dist,is_dist as is_dist
    from .core.dist import is_master as is_master,seed_worker as seed_worker
    from .core.dist import synchronized_dataloader_step as synchronized_dataloader_step
    from .core.dist import wrap_model as wrap_model
    from .core.plots import plot_curves as plot_curves
    from .core.run_dir import read_log as read_log
    from .core.tokenizer import get_tokenizer as get_tokenizer
    from .data.samples import VQADataset as VQADataset
    from .data.images import get_image_processor as get_image_processor
    from .data.loader import get_dataloaders as get_dataloaders
    from .data.prompts import get_image_string as get_image_string
    from .model.language import LanguageModel as LanguageModel
    from .model.vision import ModalityProjector as ModalityProjector,ViT as ViT
    from .model.vlm import VisionLanguageModel as VisionLanguageModel
    from .runs.run import get_vision_model as get_vision_model,run as run
    from .training.schedule import get_lr as get_lr
    from .training.ema import EMA as EMA
    from .training.trainer import Hook as Hook,Judge as Judge
    PG_CPU: object

_NAMES = { # module -> what of it is offered
    'answers.answer': 'Asker',
    'answers.look': 'exact_match',
    'api': 'evaluate export load train',
    'compat.nanovlm': 'ConstantLengthDataset PG_CPU VQACollator',
    'compat.padded': 'VLMDataset',
    'core.config': 'TrainConfig VLMConfig get_run_name preset',
    'core.dist': 'destroy_dist dist_gather dist_mean_scalar get_rank get_world_size init_dist is_dist '
         'is_master seed_worker synchronized_dataloader_step wrap_model',
    'core.plots': 'plot_curves',
    'core.run_dir': 'read_log',
    'core.tokenizer': 'get_tokenizer',
    'data.images': 'get_image_processor',
    'data.loader': 'get_dataloaders',
    'data.prompts': 'get_image_string',
    'data.samples': 'VQADataset',
    'model.language': 'LanguageModel',
    'model.vision': 'ModalityProjector ViT',
    'model.vlm': 'VisionLanguageModel',
    'runs.run': 'get_vision_model run',
    'training.schedule': 'get_lr',
    'training.ema': 'EMA',
    'training.trainer': 'Hook Judge'}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_WHERE)

_ELSEWHERE = { # names of other projects -> what does the same here
    'MiniMindVLM': 'VisionLanguageModel is the model, preset("minimind") has its sizes, '
        'VisionLanguageModel.from_pth reads its files',
    'init_model': 'make_model(vlm_cfg, train_cfg) of nanovlm_nb.runs.run gives the model, '
        'load_tokenizer(vlm_cfg) '
        'of nanovlm_nb.data.loader the tokenizer; load_from="out/lm_512.pth" names the weights',
    'train_epoch': 'run(vlm_cfg, train_cfg) trains, max_epochs says how long',
    'init_distributed_mode': 'init_dist() joins the ranks that torchrun has started',
    'Logger': 'figures are in log.jsonl of a run, see read_log; console_line="minimind" shows its line',
    'Runner': 'run(vlm_cfg, train_cfg) trains; what you add to it is a Hook',
    'CheckpointHook': 'each run keeps checkpoints: save_interval says when, max_keep_ckpts how many',
    'DeepSpeedStrategy': 'sharding="zero2" or "zero3" of TrainConfig, or deepspeed_config="ds.json"',
    'LinearLR': 'lr_schedule="cosine" begins with a linear rise, warmup_ratio says how long',
    'CosineAnnealingLR': 'lr_schedule="cosine" of TrainConfig, min_lr_ratio says where it ends'}

def __getattr__(name):
    if name in _ELSEWHERE: raise ImportError(f'{__name__} has no {name}: {_ELSEWHERE[name]}', name=name)
    if name not in _WHERE: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    try: return getattr(import_module(f'.{_WHERE[name]}', __name__), name)
    except AttributeError as e: # python would hide it
        raise ImportError(f'{__name__}.{name} cannot be imported: {e}', name=name) from e

def __dir__(): return sorted(__all__)

class _Package(ModuleType):
    "Keeps `train` the function, also when the module of the script, `nanovlm_nb.train`, has been imported."
    train = property(lambda self: __getattr__('train'), lambda self, module: None)

sys.modules[__name__].__class__ = _Package
