"A Slurm of one machine, in a folder of its own: used by test_slurm.py."

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

NEEDED = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'scontrol', 'squeue')

CONF = '''
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={slurmd_port}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=2000 Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
'''


def missing():
    "Why no Slurm can be started here; empty when it can."
    lacks = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if lacks:
        return f'no {", ".join(lacks)}: apt-get install slurm-wlm munge'
    return '' if os.geteuid() == 0 else 'Slurm is started as root'


PATH = f'{os.environ["PATH"]}:/usr/sbin:/sbin'


def free_ports(n):
    "Ports that nobody listens on."
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(('127.0.0.1', 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Slurm:
    "Inside the `with`, jobs can be submitted; the daemons end with it."

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix='slurm'))
        self.folder.chmod(0o755)  # munge's clients must reach its socket
        key = self.folder / 'munge.key'
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        for name in ('state', 'spool'):
            (self.folder / name).mkdir()
        port, slurmd_port = free_ports(2)
        conf = self.folder / 'slurm.conf'
        host = socket.gethostname().split('.')[0]
        conf.write_text(
            CONF.format(
                folder=self.folder,
                host=host,
                port=port,
                slurmd_port=slurmd_port,
                cpus=os.cpu_count(),
            )
        )
        (self.folder / 'gres.conf').write_text(
            'Name=gpu File=/dev/null\n'
        )  # stands for a GPU: Slurm gives it to the jobs that ask for one
        self.env = {**os.environ, 'PATH': PATH, 'SLURM_CONF': str(conf)}
        try:
            f = self.folder
            self(
                'munged',
                f'--key-file={key}',
                f'--socket={f}/munge.socket',
                f'--pid-file={f}/munged.pid',
                f'--log-file={f}/munged.log',
                f'--seed-file={f}/munge.seed',
            )
            self('slurmctld', '-f', conf)
            self('slurmd', '-f', conf, '-N', host)
            self.wait(
                lambda: 'idle' in self('sinfo', '-h', '-o', '%T', check=False),
                60,
                'the node is idle',
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self('scancel', '--user', 'root', check=False)
        for name in ('slurmd', 'slurmctld', 'munged'):
            self.end(self.folder / f'{name}.pid')
        shutil.rmtree(self.folder, ignore_errors=True)

    def end(self, pid_file):
        "End a daemon by its pid file."
        if not pid_file.exists():
            return
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        self.wait(
            lambda: (
                not Path(f'/proc/{pid}').exists()
                or 'State:\tZ' in Path(f'/proc/{pid}/status').read_text()
            ),
            30,
            f'{pid_file.stem} has ended',
        )

    def __call__(self, *args, cwd=None, check=True, **env):
        "Run one of Slurm's commands; gives what it printed."
        done = subprocess.run(
            [str(a) for a in args],
            cwd=cwd,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if check and done.returncode:
            raise AssertionError(
                f'{args} ended with {done.returncode}\n{done.stdout}{done.stderr}{self.logs()}'
            )
        return done.stdout

    def logs(self):
        "The last lines of the daemons."
        return ''.join(
            f'\n{p.name}\n{p.read_text(errors="replace")[-1500:]}'
            for p in sorted(self.folder.glob('*.log'))
        )

    def submit(self, script, *args, cwd, options=(), **env):
        "Hand in a job; gives its number."
        return re.search(
            r'\d+', self('sbatch', *options, script, *args, cwd=cwd, **env)
        )[0]

    def job(self, number):
        "What `scontrol show job` says."
        return dict(re.findall(r'(\w+)=(\S*)', self('scontrol', 'show', 'job', number)))

    def wait(self, so, seconds, what):
        "Wait until something is so."
        end = time.monotonic() + seconds
        while not so():
            if time.monotonic() > end:
                raise TimeoutError(f'not within {seconds} s: {what}\n{self.logs()}')
            time.sleep(0.2)
