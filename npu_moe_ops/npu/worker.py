"""One simulation in a process of its own: a job as JSON on stdin, the result as JSON in the last line of stdout."""

import json
import os
import sys

from . import cost_model, simulate, virtual


def main() -> None:
    name, fields = json.load(sys.stdin)
    if "counts" in fields:
        fields["counts"] = tuple(fields["counts"])
    result_fd = os.dup(1)
    os.dup2(2, 1)  # what the library prints goes to stderr
    virtual.start()
    job = getattr(simulate, name)(**fields)
    kernel, tensors = job.build()
    result = cost_model.count(kernel, tensors, job.trace)
    os.write(result_fd, json.dumps(result).encode() + b"\n")


if __name__ == "__main__":
    main()
