"""Kernels that start with the library imported: each is a copy of one process.

That process imports it once for a build.
"""

import os
import signal
import tempfile
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpecManager
from jupyter_client.provisioning import LocalProvisioner

from analysis_lib.errors import AnalysisError, undisturbed

THREAD_LIMITS = [
    f"{library}_NUM_THREADS" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "RAYON")
]
THREAD_LIMITS.append("VECLIB_MAXIMUM_THREADS")
# A socket's path has 107 letters at most (103 on macOS), of which 32 follow the folder for
# temporary files.
LONGEST_FOLDER = 71
# What nearly every notebook imports, and what takes long: modules, since a package may import its
# names late.
IMPORTED = [
    "ipykernel.kernelapp",
    "analysis_lib.measurement.comparison",
    "analysis_book.figures.style",
]
# What must be set before the imports. One thread: a process with several cannot be copied. An
# executed notebook needs no widgets, and the warning that they are missing would show our paths.
SETTINGS = dict.fromkeys(THREAD_LIMITS, "1") | {
    "PYTHONWARNINGS": "ignore:IProgress not found",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}


def kernel_manager(
    scratch: str, sockets: str, threads: int, environment: dict[str, str]
) -> AsyncKernelManager:
    """The manager of one kernel of this interpreter.

    Args:
        scratch: a folder that the kernel may fill, and that its caller removes.
        sockets: another one, where it listens, whose path is short. Not at ports: other programs
            may take those that are free before the kernel listens there, which ends it.
        threads: cores that it uses.
        environment: what is set in it besides.
    """
    # In no folder are kernels looked for, so that it is this interpreter, even if others are
    # installed.
    kernels = KernelSpecManager(kernel_dirs=[])
    listening = {"transport": "ipc", "connection_file": f"{sockets}/kernel.json"}
    manager = AsyncKernelManager(kernel_spec_manager=kernels, **listening)
    # The user's own configuration must not enter a result, and a run must leave nothing behind.
    # What decides where measurements are kept, as it is now: what is copied may have started
    # before.
    ours = {name: value for name, value in os.environ.items() if name.startswith("ANALYSIS_LIB_")}
    environment = ours | environment | dict.fromkeys(("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"), scratch)
    manager.provisioner = _Copied(
        parent=manager, kernel_spec=kernels.get_kernel_spec(NATIVE_KERNEL_NAME)
    )
    manager.provisioner.arguments = (manager.connection_file, threads, environment)
    return manager


def folder_for_sockets() -> str:
    """That for temporary files, or /tmp where the path of that is too long for sockets in it.

    Raises:
        AnalysisError: neither will do.
    """
    usual = tempfile.gettempdir()
    for folder in (usual, "/tmp"):
        if len(os.fsencode(folder)) <= LONGEST_FOLDER and os.access(folder, os.W_OK):
            return folder
    raise AnalysisError(
        f"no kernel can listen in {usual}, whose path is too long: set TMPDIR to a shorter one"
    )


def start_server(imported: list[str]) -> None:
    """Start the process of which others are copies, with modules imported, unless it runs."""
    forkserver.set_forkserver_preload(imported)
    before = dict(os.environ)
    usual = tempfile.tempdir
    os.environ.update(SETTINGS)
    # It listens at a socket, too.
    tempfile.tempdir = folder_for_sockets()
    try:
        with undisturbed():
            forkserver.ensure_running()
    finally:
        tempfile.tempdir = usual
        for name in SETTINGS.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


class _Copied(LocalProvisioner):
    """Starts a kernel as a copy of the process that has imported the library."""

    arguments: tuple

    async def launch_kernel(self, cmd: list[str], **_: object) -> dict:
        start_server(IMPORTED)
        process = _Process(target=_be_kernel, args=self.arguments)
        process.start()
        # Only now: what has not started cannot be stopped.
        self.process = process
        self.pid, self.pgid, self.cwd = process.pid, process.pid, Path.cwd()
        return self.connection_info


class _Process(ForkServerProcess):
    """A process of multiprocessing that is also like a Popen, as jupyter_client wants it."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int:
        self.join()
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _be_kernel(connection_file: str, threads: int, environment: dict[str, str]) -> None:
    import threadpoolctl
    import torch
    from ipykernel.kernelapp import IPKernelApp

    from analysis_lib.measurement.processes import end_with_parent

    # A Ctrl-C in the terminal is for the build, which stops its kernels.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ |= dict.fromkeys(THREAD_LIMITS, str(threads)) | environment
    torch.set_num_threads(threads)
    threadpoolctl.threadpool_limits(threads)
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    end_with_parent()
    # Figures as SVG, without a date; the extension adds a PNG, and what they are drawn from.
    shown = ["--InlineBackend.figure_formats={'svg'}", "--ext=analysis_book.build.recording"]
    shown.append(
        "--InlineBackend.print_figure_kwargs={'bbox_inches': 'tight', 'metadata': {'Date': None}}"
    )
    IPKernelApp.launch_instance(argv=["-f", connection_file, *shown])
