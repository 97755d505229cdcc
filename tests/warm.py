"""A python that is warm: it takes what `python` takes, and has imported already what the commands import.

`Warm` starts a server, which imports the libraries once and forks from then on. `Warm.python` stands where a python would: it
hands its arguments, surroundings and open files to the server, passes signals on, and ends as its command ends. Each command
is a process of its own all the same, with its own memory, modules, signals and end; only the seconds of CPU that imports take
are spent once. A rank is called `rank N` in /proc/PID/comm, so that it can be found, see `ranks_of` of commands.py. Not for a test
that looks at memory, at what is imported, at a process group, or for a process that it knows by the number of its start."""

import os
import signal
import socket
import sys
from contextlib import suppress

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
IMPORTED = (
    'torch._dynamo',
    'torch.distributed.run',
    'torch.distributed.checkpoint',
    'wandb',
    'matplotlib.pyplot',
)  # and all of the package


# --- where the tests are


class Warm:
    "A server of this test process, started by the first command and ended by `close`."

    def __init__(self, env):
        import subprocess
        import tempfile

        self.folder = tempfile.TemporaryDirectory(prefix='warm')
        address = f'{os.path.basename(self.folder.name)}-{os.getpid()}'
        self.python = (
            f'{self.folder.name}/python'  # no file: its path may have 107 characters
        )
        with open(self.python, 'w') as f:
            f.write(
                f'#!/bin/sh\nexec {sys.executable} -IS {os.path.abspath(__file__)} ask {address} "$@"\n'
            )
        os.chmod(self.python, 0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f'\0{address}')
            listener.listen(64)
            self.server = subprocess.Popen(
                [
                    sys.executable,
                    os.path.abspath(__file__),
                    'serve',
                    str(listener.fileno()),
                ],
                env=env,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def close(self):
        "End the server, and wait for it, so that its time counts as that of this process's children."
        self.server.stdin.close()
        self.server.wait()
        self.folder.cleanup()


# --- where a python would be: starts in milliseconds, so it imports nothing


def ask(address, args):
    "Have a command run, and end as it ends."
    conn = socket.socket(socket.AF_UNIX)
    conn.connect(f'\0{address}')
    words = '\0'.join(
        [
            str(len(args)),
            os.getcwd(),
            *args,
            *(f'{k}={v}' for k, v in os.environ.items()),
        ]
    ).encode('utf-8', 'surrogateescape')
    socket.send_fds(conn, [len(words).to_bytes(8, 'big')], [0, 1, 2])
    conn.sendall(words)

    def pass_on(s, _):
        with suppress(BrokenPipeError):
            conn.send(bytes([s]))  # the command has just ended

    for s in PASSED_ON:
        signal.signal(s, pass_on)
    found = conn.recv(4)
    status = (
        int.from_bytes(found, 'big') if found else signal.SIGKILL
    )  # no answer: the server is gone
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))


# --- the server


def load():
    "Import what commands import."
    import gc
    import importlib
    import io
    import pkgutil
    import nanovlm_nb

    for name in (
        *IMPORTED,
        *(m.name for m in pkgutil.walk_packages(nanovlm_nb.__path__, 'nanovlm_nb.')),
    ):
        importlib.import_module(name)
    importlib.import_module(
        'transformers'
    ).AutoTokenizer  # knows every model there is: a second to import
    nanovlm_nb.core.settings.SettingsParser()
    nanovlm_nb.data.shapes._conversations()  # and what else is the same in many runs, and kept once it is known: texts, the rows of TINY in commands.py, fonts
    for rows in (200, 'train', 0), (16, 'validation', 0):
        nanovlm_nb.data.shapes.shapes_dataset(*rows)
    nanovlm_nb.core.plots.plot_curves(
        [
            dict(step=n, batch_loss=6 - n / 10, val_loss=6, lr_mp=10.0**-n, grad_norm=n)
            for n in range(7)
        ],
        io.BytesIO(),
    )  # ticks are measured for the size in which they are saved
    gc.freeze()  # so that forks share what is here until they change it
    threads = {
        open(f'/proc/self/task/{t}/comm').read().strip()
        for t in os.listdir('/proc/self/task')
        if int(t) != os.getpid()
    }
    assert threads <= {'jemalloc_bg_thd'}, (
        f'imports have started {threads}'
    )  # the one of pyarrow, which minds forks


def request(conn):
    "Open files of a command; its directory, arguments and environment, or None if the one who asks was killed while asking."
    head, fds, *_ = socket.recv_fds(conn, 8, 3)
    words = conn.recv(size := int.from_bytes(head, 'big'), socket.MSG_WAITALL)
    if not head or len(words) < size:
        return fds, None
    n, cwd, *rest = words.decode('utf-8', 'surrogateescape').split('\0')
    return fds, (
        cwd,
        rest[: int(n)],
        dict(line.split('=', 1) for line in rest[int(n) :]),
    )


def become(fds, cwd, args, env, search):
    "Make this fork what `python args` is when it starts; returns what is left to do."
    import runpy
    import types
    import warnings
    import numpy

    for to, fd in enumerate(fds):
        os.dup2(fd, to)
    for fd in fds:
        os.close(fd)
    os.setsid()
    for s in PASSED_ON:
        signal.signal(
            s, signal.default_int_handler if s == signal.SIGINT else signal.SIG_DFL
        )
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if 'RANK' in env:
        open('/proc/self/comm', 'w').write(f'rank {env["RANK"]}')
    sys.executable = env.get(
        'PYTHON_EXEC', sys.executable
    )  # so that what the command starts is warm too
    numpy.random.seed()  # the others are seeded anew by a fork, or not by a start
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    while args[0] == '-u':
        args = args[1:]
    kind, (what, *rest) = (args[0], args[1:]) if args[0] in ('-m', '-c') else ('', args)
    sys.path[:] = [
        {'-m': cwd, '-c': ''}.get(kind, os.path.dirname(os.path.abspath(what))),
        *filter(None, env.get('PYTHONPATH', '').split(':')),
        *search,
    ]
    sys.argv = [kind or what, *rest]
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    warnings.filterwarnings('ignore', '.*found in sys.modules', RuntimeWarning)
    if kind == '-m':
        return lambda: runpy._run_module_as_main(what)
    if not kind:
        main.__file__ = what
    return lambda: exec(
        compile(
            what if kind else open(what, encoding='utf-8').read(),
            what if not kind else '<string>',
            'exec',
        ),
        vars(main),
    )


def end(job):
    """Do what is left to do, and end as a python does, but for taking itself apart.

    That would write to each page that a fork shares with the server: half a second of CPU to copy them, and as much to free them.
    Whoever ends otherwise than with a number leaves it to Python."""
    import atexit
    import threading

    status = 0
    try:
        job()
    except SystemExit as e:
        if not isinstance(e.code, int | None):
            raise
        status = e.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


def serve(listener, search):
    "Fork for each command until the tests have closed standard input; returns in each fork with what is to be done there."
    import selectors

    choose = selectors.DefaultSelector()
    jobs = {}
    choose.register(0, selectors.EVENT_READ)
    choose.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in sorted(
            choose.select(), key=lambda event: event[0].fileobj is listener
        ):  # who was killed is dead before the next one starts
            if key.fileobj == 0:
                return None
            if key.fileobj is listener:
                conn = listener.accept()[0]
                fds, wanted = request(conn)
                if wanted and (pid := os.fork()) == 0:
                    for f in (
                        choose,
                        listener,
                        conn,
                        *(c for _, c, _ in jobs.values()),
                    ):
                        f.close()
                    for end in {end for _, _, end in jobs.values()}:
                        os.close(end)
                    return become(fds, *wanted, search)
                for fd in fds:
                    os.close(fd)
                if not wanted:
                    continue
                end = os.pidfd_open(pid)
                jobs[end] = jobs[conn] = pid, conn, end
                for f in (conn, end):
                    choose.register(f, selectors.EVENT_READ)
            elif key.fileobj in jobs:
                pid, conn, end = jobs[key.fileobj]
                if key.fileobj is conn:  # a signal, or the one who asked was killed
                    for s in conn.recv(16) or [signal.SIGKILL]:
                        os.kill(pid, s)
                    continue
                status = os.waitpid(pid, 0)[1]
                with suppress(OSError):
                    conn.send(status.to_bytes(4, 'big'))
                for f in (conn, end):
                    choose.unregister(f)
                    del jobs[f]
                conn.close()
                os.close(end)


if __name__ == '__main__':
    action, where, *args = sys.argv[1:]
    if action == 'ask':
        ask(where, args)
    else:
        del sys.path[0]
        load()
        job = serve(socket.socket(fileno=int(where)), list(sys.path))
        if job:
            end(job)
