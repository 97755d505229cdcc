"Read what wandb wrote offline: a `.wandb` file is a LevelDB log of protobuf records, in blocks of 32 KiB."
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

BLOCK, HEADER, FULL, LAST = 32768, 7, 1, 4


@dataclass
class WandbRun:
    "One offline run."
    project: str = ''
    entity: str = ''
    name: str = ''
    config: dict = field(default_factory=dict)
    history: list = field(default_factory=list)     # one dict a step; `_step` is the step
    x_axes: dict = field(default_factory=dict)      # metric or pattern -> the metric that is its x-axis
    exit_code: int | None = None

    def series(self, name: str) -> dict:
        "Values of one metric by step."
        return {row['_step']: row[name] for row in self.history if name in row}


def chunks(data: bytes):
    "The records' bytes, put together from their pieces."
    at, parts = HEADER, b''                          # the file begins with wandb's own header
    while at+HEADER <= len(data):
        left = BLOCK-at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack('<IHB', data[at:at+HEADER])
        parts += data[at+HEADER:at+HEADER+size]
        at += HEADER+size
        if kind in (FULL, LAST):
            yield parts
            parts = b''


def key_of(item) -> str:
    "A key may be written whole or in parts."
    return item.key or '.'.join(item.nested_key)


def read_wandb(run_dir) -> WandbRun:
    "The only offline run below `run_dir`."
    from wandb.proto import wandb_internal_pb2 as pb
    files = sorted(Path(run_dir).glob('wandb/offline-run-*/*.wandb'))
    assert len(files) == 1, f'{len(files)} offline runs below {run_dir}, expected 1'
    run = WandbRun()
    for data in chunks(files[0].read_bytes()):
        record = pb.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof('record_type')
        if kind == 'run':
            run.project, run.entity, run.name = record.run.project, record.run.entity, record.run.display_name
            run.config |= {key_of(u): json.loads(u.value_json) for u in record.run.config.update}
        elif kind == 'config': run.config |= {key_of(u): json.loads(u.value_json) for u in record.config.update}
        elif kind == 'history': run.history.append({key_of(i): json.loads(i.value_json) for i in record.history.item})
        elif kind == 'metric': run.x_axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        elif kind == 'exit': run.exit_code = record.exit.exit_code
    return run
