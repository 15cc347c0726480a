"""python -m benchmarks.one_core MODULE ARGUMENT...: holds TF_CONFIG's worker i to the i-th core.

With FIRST_CORE=k in the environment it is the (i + k)-th core, for several runs at the same time.

Thread counts alone do not keep a worker on one core: Python, the runtime's two inter-op threads and
procgen's thread spread over whatever is idle, so a lone worker would be measured with more of the machine
than each of two has.
"""

import json
import os
import runpy
import sys

if __name__ == "__main__":
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    index += int(os.environ.get("FIRST_CORE", "0"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
