"""Processes that must not outlive who started them."""

import os
import subprocess
import sys
import threading

import pytest

from opentinker_kit.lifeline import watch_lifeline
from opentinker_kit.testing import wait_until_sync

from .test_frames import running

PARENT = """
import subprocess, sys, time
from opentinker_kit.lifeline import die_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], preexec_fn=die_with_parent)
print(child.pid, flush=True)
time.sleep(1000)
"""


def test_eof_is_reported_once_every_writer_is_gone() -> None:
    read, write = os.pipe()
    second = os.dup(write)
    closed = threading.Event()
    thread = watch_lifeline(read, closed.set)
    os.close(write)
    assert not closed.wait(0.1)
    os.close(second)
    assert closed.wait(5)
    thread.join(5)
    os.close(read)


def test_data_on_the_pipe_is_no_eof() -> None:
    read, write = os.pipe()
    closed = threading.Event()
    watch_lifeline(read, closed.set)
    os.write(write, b"noise")
    assert not closed.wait(0.1)
    os.close(write)
    assert closed.wait(5)
    os.close(read)


def test_a_bad_descriptor_is_an_error_at_once() -> None:
    read, write = os.pipe()
    os.close(write)
    os.close(read)
    with pytest.raises(OSError, match="Bad file descriptor"):
        watch_lifeline(read, lambda: None)


def test_the_kernel_kills_programs_that_know_no_lifeline() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert running(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_sync(lambda: not running(child), 5)
