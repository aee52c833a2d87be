"""Starts training processes quickly, so that many can be killed: a script that imports once and forks for each run.

Reads a JSON object a line, ``{"job": arguments of training.train, "count": processes}``, answers with the processes'
ids, and once all of them have ended with their exit statuses: negative for a signal.
"""

import contextlib
import json
import os
import socket
import sys
import traceback

import datasets
import torch
from training import train


def be_born(rank, count, port, job):
    """Train as one of several processes, and never return."""
    status = 1
    with contextlib.suppress(BaseException):
        if count > 1:
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)})
            os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
        log = os.open(f"{job['out']}-r{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            train(**job)
            status = 0
        except BaseException:
            traceback.print_exc()
    os._exit(status)


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def main():
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    say({"ready": True})
    for line in sys.stdin:
        wanted = json.loads(line)
        count, port, children = wanted["count"], free_port(), []
        for rank in range(count):
            child = os.fork()
            if not child:
                be_born(rank, count, port, wanted["job"])
            children.append(child)
        say({"ids": children})
        say({"statuses": [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]})


def say(message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
