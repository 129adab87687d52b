"""Process control and limits that differ between POSIX and Windows."""

import _thread
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from nearkin.errors import UserError


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine is running; True if in doubt."""
    if sys.platform == "win32":  # where os.kill(pid, 0) would end the process
        import ctypes

        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.OpenProcess.restype = ctypes.c_void_p
        handle = ctypes.c_void_p(kernel.OpenProcess(0x100000, False, pid))  # SYNCHRONIZE
        if not handle:
            return ctypes.get_last_error() != 87  # ERROR_INVALID_PARAMETER: no such process
        try:
            return bool(kernel.WaitForSingleObject(handle, 0))  # 0: it has ended
        finally:
            kernel.CloseHandle(handle)
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True


def other_processes_run(loadavg: str = "/proc/loadavg") -> bool:
    """Return whether another process or thread of this machine keeps a core busy at the moment."""
    if not os.path.exists(loadavg):
        return hasattr(os, "getloadavg") and os.getloadavg()[0] >= 1
    for _ in range(3):  # at three moments: a task that happens to wake up does not count
        with open(loadavg, encoding="ascii") as file:
            running = int(file.read().split()[3].partition("/")[0])
        if running <= 1:  # ourselves
            return False
        time.sleep(0.01)
    return True


def keep_freed_memory() -> None:
    """Keep freed memory: glibc would return large blocks, and clearing new ones takes a network as long as its sums."""
    if any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")):
        return  # the user's choice
    mmap_threshold, trim_threshold = -3, -1  # names of glibc's parameters
    if mallopt := _libc("mallopt"):
        mallopt(mmap_threshold, 1 << 30) or mallopt(mmap_threshold, 1 << 25)  # the most that old versions accept
        mallopt(trim_threshold, -1)


def return_freed_memory() -> None:
    """Return to the system what `keep_freed_memory` has kept."""
    if trim := _libc("malloc_trim"):
        trim(0)


def _libc(function: str) -> Callable[..., int] | None:
    import ctypes

    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None


def ignore_terminal_interrupts() -> None:
    """Stop receiving Ctrl-C from the terminal; the parent process still does, and decides what to do."""
    if sys.platform == "win32":
        import ctypes

        ctypes.WinDLL("kernel32").SetConsoleCtrlHandler(None, True)
    elif hasattr(os, "setsid"):
        os.setsid()


def interrupt_after(wait: Callable[[], object]) -> None:
    """Interrupt the main thread, as Ctrl-C would, once `wait` returns in a thread."""

    def run() -> None:
        with suppress(EOFError, OSError):
            wait()
        _thread.interrupt_main()

    threading.Thread(target=run, daemon=True).start()


def check_address_space() -> None:
    """Refuse a `ulimit -v` in which torch's libraries would abort this process; below 8 GB, a child process tries."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or limit >= 8 << 30:
        return
    import subprocess

    code = "import mmap, torch; mmap.mmap(-1, 160 << 20)"
    if subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode:
        raise UserError(
            f"The limit on the address space is {limit / 1e9:.1f} GB (ulimit -v), too little to load torch. "
            "Raise it, e.g. ulimit -v unlimited; docs/install.md lists how much memory each command needs."
        )
