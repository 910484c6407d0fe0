"""Runs N tasks of /bin/true through HyperQueue's LocalCluster on C cores and prints tasks a second.

Usage: hq_local_cluster.py TASKS CORES kept|off. kept: each task's stdout and stderr go to files of their own, which is HyperQueue's default;
off: they are thrown away.
"""

import os
import sys
import tempfile
import time

from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig

tasks, cores, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
streams = {"kept": {}, "off": {"stdout": None, "stderr": None}}[output]
with tempfile.TemporaryDirectory() as folder, LocalCluster() as cluster:
    os.chdir(folder)
    cluster.start_worker(WorkerConfig(cores=cores))
    client = cluster.client()
    job = Job()
    for _ in range(tasks):
        job.program(["/bin/true"], **streams)
    started = time.monotonic()
    client.wait_for_jobs([client.submit(job)])
    rate = tasks / (time.monotonic() - started)
    written = len(os.listdir(folder))
    assert written == (2 * tasks if output == "kept" else 0), f"{written} files"
    print(rate)
    os.chdir("/")
