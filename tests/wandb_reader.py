"Read what wandb wrote offline: a `.wandb` file is a LevelDB log of protobuf records, in blocks of 32 KiB."

import json
import struct
from pathlib import Path
from types import SimpleNamespace

BLOCK = 32768
HEADER = 7
FULL = 1
LAST = 4


def chunks(data: bytes):
    "The records' bytes, put together from their pieces."
    at = HEADER
    parts = b''  # the file begins with wandb's own header
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack('<IHB', data[at : at + HEADER])
        parts += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (FULL, LAST):
            yield parts
            parts = b''


def values(items) -> dict:
    "Keys, written whole or in parts, and what they hold."
    return {i.key or '.'.join(i.nested_key): json.loads(i.value_json) for i in items}


def read_wandb(run_dir) -> SimpleNamespace:
    "The only offline run below `run_dir`: its names, `config`, `history` (a dict a step), `x_axes` (metric -> its x-axis) and `exit_code`."
    from wandb.proto import wandb_internal_pb2 as pb

    (file,) = Path(run_dir).glob('wandb/offline-run-*/*.wandb')
    run = SimpleNamespace(config={}, history=[], x_axes={})
    for data in chunks(file.read_bytes()):
        record = pb.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof('record_type')
        if kind == 'run':
            run.project = record.run.project
            run.entity = record.run.entity
            run.name = record.run.display_name
            run.config |= values(record.run.config.update)
        elif kind == 'config':
            run.config |= values(record.config.update)
        elif kind == 'history':
            run.history.append(values(record.history.item))
        elif kind == 'metric':
            run.x_axes[record.metric.glob_name or record.metric.name] = (
                record.metric.step_metric
            )
        elif kind == 'exit':
            run.exit_code = record.exit.exit_code
    return run
