"""Tests are small: two threads would mostly wait for each other where cores are busy. Tests about threads
set their own; ``OMP_NUM_THREADS`` overrules."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; also for processes of tests
