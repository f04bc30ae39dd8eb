"""The long text of every error: what it means, an example, what to do. `zbc explain CODE` prints it.

One file for each family of codes. A test demands that the codes here are exactly those that zbc raises.
"""

from __future__ import annotations

from zbc.explain import environment, failed, files, fit, job, order, user_code
from zbc.explain.entry import Explanation as Explanation

# Second character of a code -> what its family is about.
FAMILIES = {
    "1": "A problem in the job file or on the command line (exit code 3).",
    "2": "The order of operations is wrong (exit code 4).",
    "3": "The plan is right but does not fit (exit code 5).",
    "4": "A problem with a plan directory or a file of another tool (exit code 4).",
    "5": "A problem in the data or in the user's own code (exit code 6).",
    "6": "The environment is not what the command needs (exit code 6).",
    "7": "A run failed (exit code 7).",
}

# code -> its entry, in the order of the codes.
CATALOGUE = {
    **job.ENTRIES,
    **order.ENTRIES,
    **fit.ENTRIES,
    **files.ENTRIES,
    **user_code.ENTRIES,
    **environment.ENTRIES,
    **failed.ENTRIES,
}
