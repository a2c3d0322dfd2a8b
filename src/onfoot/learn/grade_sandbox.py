"""Filters of the Linux kernel that a process puts on itself before it runs a submission, and cannot take off again.

`forbid_calls` (seccomp) refuses new processes, signals to others, sockets and changes of limits. `forbid_files`
(Landlock) allows writing in one folder and reading in a few. Both return whether they hold: a kernel may be too old for
them, and other systems have neither. No privileges are needed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

NO_NEW_PRIVILEGES, SET_SECCOMP, PARENT_DEATH_SIGNAL, SUBREAPER = 38, 22, 1, 36  # prctl
ALLOW, REFUSE, PRETEND_UNKNOWN = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of the filter
THREAD = 0x00010000  # the flag of clone that makes a thread, not a process

# Per machine: its number for the audit, then its numbers of system calls.
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE, CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
SIGNALS = {"x86_64": (62, 234, 129, 297), "aarch64": (129, 131, 138, 240)}  # kill, tgkill, (t)sigqueueinfo
SET_LIMIT = {"x86_64": 302, "aarch64": 261}  # prlimit64: refused if it sets
REFUSED = {
    "x86_64": (
        *(57, 58, 59, 322),  # fork, vfork, execve, execveat
        *(200, 101, 310, 311),  # tkill, ptrace, process_vm_readv, process_vm_writev
        *(109, 112, 160, 141, 142, 144, 203),  # setpgid, setsid, setrlimit, priorities, affinity
        *(41, 53, 29, 64, 68),  # socket, socketpair, shmget, semget, msgget
        *(155, 161, 165, 166, 169, 272, 308),  # pivot_root, chroot, mount, umount2, reboot, unshare, setns
        *(248, 250, 298, 321, 323),  # add_key, keyctl, perf_event_open, bpf, userfaultfd
    ),
    "aarch64": (
        *(221, 281, 130, 117, 270, 271),
        *(154, 157, 164, 140, 118, 119, 122),
        *(198, 199, 194, 190, 186),
        *(41, 51, 40, 39, 142, 97, 268),
        *(217, 219, 241, 280, 282),
    ),
}
REFUSED_EVERYWHERE = (424, 425, 434, 438)  # pidfd_send_signal, io_uring_setup, pidfd_open, pidfd_getfd

EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 0b1, 0b10, 0b100, 0b1000  # Landlock
CREATE_RULES, ADD_RULE, RESTRICT = 444, 445, 446


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def _prctl(option: int, *arguments: object) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    padded = [*arguments, 0, 0, 0, 0][:4]
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, *padded) == 0)


def die_with_parent(signal: int = 9) -> bool:
    """Asks for that signal when the parent dies."""
    return _prctl(PARENT_DEATH_SIGNAL, signal)


def adopt_orphans() -> bool:
    """Makes this process the parent of processes below it whose own parent has ended, so that it can end them."""
    return _prctl(SUBREAPER, 1)


def forbid_calls() -> bool:
    """Refuses system calls that reach beyond this process: each then fails with "Operation not permitted"."""
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in MACHINES or sys.maxsize < 2**32:
        return False
    rules = filter_program(machine, os.getpid())
    program = _Program(len(rules), (_Instruction * len(rules))(*(_Instruction(*rule) for rule in rules)))
    return _prctl(NO_NEW_PRIVILEGES, 1) and _prctl(SET_SECCOMP, 2, ctypes.byref(program))


def filter_program(machine: str, pid: int) -> list[tuple[int, int, int, int]]:
    """The instructions (code, jump if true, jump if false, value): which calls a process with that id may make."""
    number, arch, first, third = 0, 4, 16, 32  # offsets of the call's number, the machine and two arguments
    refuse = (RETURN, 0, 0, REFUSE)
    rules = [(LOAD, 0, 0, arch), (EQUAL, 1, 0, MACHINES[machine]), refuse, (LOAD, 0, 0, number)]
    rules += [(AT_LEAST, 0, 1, 0x40000000), refuse]  # the other numbering of x86-64
    for call in (*REFUSED[machine], *REFUSED_EVERYWHERE):
        rules += [(EQUAL, 0, 1, call), refuse]
    rules += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, PRETEND_UNKNOWN)]  # its flags are in memory; clone is tried next
    rules += [(EQUAL, 0, 3, CLONE[machine]), (LOAD, 0, 0, first), (ANY_BIT, 1, 0, THREAD), refuse]
    rules += [(LOAD, 0, 0, number)]
    for call in SIGNALS[machine]:
        rules += [(EQUAL, 0, 3, call), (LOAD, 0, 0, first), (EQUAL, 1, 0, pid), refuse, (LOAD, 0, 0, number)]
    rules += [(EQUAL, 0, 5, SET_LIMIT[machine]), (LOAD, 0, 0, third), (EQUAL, 0, 2, 0)]  # a null pointer sets nothing
    rules += [(LOAD, 0, 0, third + 4), (EQUAL, 1, 0, 0), refuse]
    return [*rules, (RETURN, 0, 0, ALLOW)]


def forbid_files(writable: Path, readable: Mapping[Path, int]) -> bool:
    """Allows everything below one folder, and to others what they permit; nothing else can be opened."""
    if not sys.platform.startswith("linux"):
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    version = call(CREATE_RULES, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        return False
    everything = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    rules = call(CREATE_RULES, struct.pack("=Q", everything), ctypes.c_size_t(8), ctypes.c_uint(0))
    if rules < 0:
        return False
    try:
        for path, access in {**readable, writable: everything, Path(os.devnull): READ_FILE | WRITE_FILE}.items():
            _allow(call, rules, path, access)
        return _prctl(NO_NEW_PRIVILEGES, 1) and call(RESTRICT, rules, ctypes.c_uint(0)) == 0
    finally:
        os.close(rules)


def _allow(call: Callable[..., int], rules: int, path: Path, access: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
    except OSError:
        return  # what does not exist needs no permission
    try:
        call(ADD_RULE, rules, ctypes.c_uint(1), struct.pack("=Qi", access, folder), ctypes.c_uint(0))
    finally:
        os.close(folder)


def python_paths(hidden: Path) -> dict[Path, int]:
    """Where Python and its packages may be read, with the permissions; one package is hidden."""
    system = ["/usr", "/lib", "/lib64", "/dev/urandom", "/dev/zero", "/etc/localtime"]
    folders = [*system, f"{sys.base_prefix}/lib", f"{sys.prefix}/lib", *filter(None, sys.path)]
    found: dict[Path, int] = {}
    for folder in folders:
        found |= all_but(Path(folder).resolve(), hidden.resolve())
    return found


def all_but(path: Path, hidden: Path) -> dict[Path, int]:
    """The permissions that let everything below a path be read, except what is below `hidden`."""
    if path == hidden or hidden in path.parents or not path.exists():
        return {}
    if path not in hidden.parents:
        return {path: READ_FILE | READ_FOLDER | EXECUTE if path.is_dir() else READ_FILE | EXECUTE}
    found = {path: READ_FOLDER}  # Python lists the folder to find modules
    for child in path.iterdir():
        found |= all_but(child, hidden)
    return found
