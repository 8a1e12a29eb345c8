"""A filter of system calls for jailed code, as the bytes that the kernel takes.

Namespaces and limits keep code in; this keeps it away from parts of the kernel that no program here needs and
that the limits do not cover: memory outside any process (memfd, System V), tracing and reading other
processes, more namespaces, mounts, keys, BPF, io_uring, and sockets that a network namespace does not hold
(vsock reaches the host of a virtual machine). What is refused fails with EPERM; a program of another
architecture is killed. `clone3` hides its flags from filters: it is said not to exist, and libc uses `clone`.
"""

import os
import platform
import struct
from functools import cache

_EPERM, _ENOSYS = 1, 38
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_ERRNO = 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32 = 0x40000000
# New user, mount, pid, network, IPC, host name and cgroup namespaces. (`clone` cannot ask for one of time.)
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
_UNIX, _IPV4, _IPV6 = 1, 2, 10

# Name: (x86_64, aarch64).
_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "syslog": (103, 116),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def known() -> bool:
    """Whether there is a filter for this machine's architecture."""
    return platform.machine() in _ARCHITECTURES


def readable() -> int:
    """A descriptor from which the filter is read once."""
    reader, writer = os.pipe()
    os.write(writer, program())
    os.close(writer)
    return reader


@cache
def program() -> bytes:
    """The filter. KeyError where `known` is false."""
    column, architecture = _ARCHITECTURES[platform.machine()]
    refuse = _step(_RETURN, _ERRNO | _EPERM)
    code = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        _step(_AT_LEAST, _X32, 0, 1),
        refuse,
    ]
    for numbers in _REFUSED.values():
        code += [_step(_EQUAL, numbers[column], 0, 1), refuse]
    code += [_step(_EQUAL, _CLONE3[column], 0, 1), _step(_RETURN, _ERRNO | _ENOSYS)]
    code += [
        _step(_EQUAL, _CLONE[column], 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT_AT),
        _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        refuse,
        _step(_RETURN, _ALLOW),
    ]
    code += [
        _step(_EQUAL, _SOCKET[column], 0, 5),
        _step(_LOAD, _FIRST_ARGUMENT_AT),
        _step(_EQUAL, _UNIX, 3, 0),
        _step(_EQUAL, _IPV4, 2, 0),
        _step(_EQUAL, _IPV6, 1, 0),
        refuse,
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
