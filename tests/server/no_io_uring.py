"""Run a command that may not use io_uring: `python no_io_uring.py COMMAND...`.

A seccomp filter answers io_uring_setup with EPERM, as Docker's default profile does. It is inherited by everything that
the command starts.
"""

import ctypes
import errno
import os
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_IO_URING_SETUP = 425  # the same on every architecture
_LOAD, _EQUAL, _ANSWER = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


def refusal() -> str:
    """Return why the kernel sets up no ring for this process, or nothing if it does."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_IO_URING_SETUP, 1, ctypes.create_string_buffer(120))
    if fd < 0:
        return os.strerror(ctypes.get_errno())
    os.close(fd)
    return ""


def forbid_io_uring() -> None:
    """Install the filter for this process and its children; raises OSError where the kernel has no seccomp."""
    operations = (
        (_LOAD, 0, 0, 0),
        (_EQUAL, 0, 1, _IO_URING_SETUP),
        (_ANSWER, 0, 0, _ERROR | errno.EPERM),
        (_ANSWER, 0, 0, _ALLOW),
    )
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *op) for op in operations))
    header = struct.pack("HxxxxxxP", len(operations), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header)):
        if libc.prctl(*arguments, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    forbid_io_uring()
    os.execvp(sys.argv[1], sys.argv[1:])
