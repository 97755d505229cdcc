"Real pictures in FineVision's schema, trained on through the command line."
from pathlib import Path

import datasets
import numpy as np
import pytest
from commands import TINY, train
from PIL import Image

from nanovlm_nb.core.run_dir import read_log

FLAGS = [*TINY, '--run_name', 'r', '--max_img_size', 128, '--max_training_steps', 3, '--val_size', 4, '--data_cutoff_idx', 30, '--ask_samples', 2]


def row(picture, question, answer, relevance=5):
    "A sample with one picture and one turn."
    return dict(images=[picture], texts=[dict(user=question, assistant=answer)], relevance_ratings=[relevance], image_correspondence_ratings=[5],
                visual_dependency_ratings=[5], formatting_ratings=[5], source='real')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "`photos` (parquet), `digits` (save_to_disk, half of them rated 1) and `broken` (a parquet file cut in two)."
    root = tmp_path_factory.mktemp('data')
    data = Path(pytest.importorskip('skimage').__file__).parent/'data'
    photos = [Image.open(f).convert('RGB').resize((200, 150)) for f in sorted(data.glob('*.png'))][:6]
    assert len(photos) >= 4
    (root/'photos').mkdir()
    photo_rows = [row(p, 'What is in the picture?', f'It is photo {i}.') for i, p in enumerate(photos)]
    datasets.Dataset.from_list(photo_rows).to_parquet(root/'photos'/'train-00000-of-00001.parquet')
    digits = pytest.importorskip('sklearn.datasets').load_digits()
    pictures = [Image.fromarray((x*15).astype(np.uint8)).resize((64, 64)) for x in digits.images[:24]]
    rows = [row(p, 'Which digit is it?', f'{t}', relevance=1+4*(i % 2)) for i, (p, t) in enumerate(zip(pictures, digits.target))]
    datasets.Dataset.from_list(rows).save_to_disk(root/'digits')
    (root/'broken').mkdir()
    whole = (root/'photos'/'train-00000-of-00001.parquet').read_bytes()
    (root/'broken'/'train-00000-of-00001.parquet').write_bytes(whole[:len(whole)//2])
    return root


def trained(cwd, *flags):
    "Log and records of a run."
    train([*FLAGS, *flags], cwd)
    run_dir = cwd/'checkpoints'/'r'
    records = read_log(run_dir/'log.jsonl')
    assert len([r for r in records if 'batch_loss' in r and r['batch_loss'] > 0 and r['grad_norm'] > 0]) == 3
    return (run_dir/'train.log').read_text(), records, run_dir


def test_all_configurations_but_the_broken_one(folder, tmp_path):
    log, records, run_dir = trained(tmp_path, '--train_dataset_path', folder, '--train_dataset_name', 'all')
    assert (run_dir/'samples.png').exists()
    assert 'answers/real' in records[-1]


def test_a_broken_configuration_is_named(folder, tmp_path):
    done = train([*FLAGS, '--train_dataset_path', folder, '--train_dataset_name', 'digits', 'broken'], tmp_path)
    warned = [line for line in done.stderr.splitlines() if 'skipped data set' in line]
    assert len(warned) == 1 and 'broken' in warned[0]
    only = train([*FLAGS, '--run_name', 'none', '--train_dataset_path', folder, '--train_dataset_name', 'broken'], tmp_path, check=False)
    assert only.returncode and 'No valid datasets were loaded.' in only.stderr


def test_one_parquet_file_and_one_saved_folder(folder, tmp_path):
    for name in ('photos', 'digits'):
        (tmp_path/name).mkdir()
        trained(tmp_path/name, '--train_dataset_path', folder/name, '--val_size', 2)


def test_ratings_filter(folder, tmp_path):
    log, records, _ = trained(tmp_path, '--train_dataset_path', folder/'digits', '--relevance_min_rating', 5)
    dropped = {k: v for r in records for k, v in r.items() if k.startswith('drops/')}
    assert sum(dropped.values()) == 12 and set(dropped) <= {'drops/train_ratings', 'drops/val_ratings'}
    assert 'left out: ' in log
