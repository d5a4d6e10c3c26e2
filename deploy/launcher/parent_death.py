"""A child dies with its launcher, even when that is killed with SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends.

    SIGKILL, not SIGTERM: there is nobody left to wait for a graceful end, and etcd goes too.

    Args:
        parent_pid: the launcher; when it is our parent no more, it died before this call.

    Raises:
        SystemExit: the launcher is gone already.
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        raise SystemExit(0)
