"""Runs N tasks of /bin/true through HyperQueue's LocalCluster on C cores and prints tasks a second.

Usage: hq_local_cluster.py TASKS CORES. Output is not captured (stdout and stderr off), which is HyperQueue's fastest setting.
"""

import sys
import time

from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig

tasks, cores = int(sys.argv[1]), int(sys.argv[2])
with LocalCluster() as cluster:
    cluster.start_worker(WorkerConfig(cores=cores))
    client = cluster.client()
    job = Job()
    for _ in range(tasks):
        job.program(["/bin/true"], stdout=None, stderr=None)
    started = time.monotonic()
    client.wait_for_jobs([client.submit(job)])
    print(tasks / (time.monotonic() - started))
