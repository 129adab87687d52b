"""Imported as `sitecustomize`: take away what Windows lacks, in this process and in those it starts."""

import contextlib
import os
import signal
import sys

import filelock  # noqa: F401  (uses fcntl itself where there is one, like torch)
import torch  # noqa: F401

MODULES = ("fcntl", "resource", "pwd", "grp", "termios")
OS_NAMES = ("setsid", "fork", "killpg", "sched_getaffinity", "getuid", "geteuid", "uname", "pwrite", "pread")
SIGNALS = ("SIGALRM", "SIGKILL", "SIGHUP")

for name in MODULES:
    sys.modules[name] = None
for owner, names in ((os, OS_NAMES), (signal, SIGNALS)):
    for name in names:
        with contextlib.suppress(AttributeError):
            delattr(owner, name)
