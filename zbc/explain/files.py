"""E4xx: plan directories and files of other tools."""

from __future__ import annotations

from zbc.explain.entry import entry

ENTRIES = {
    "E401": entry(
        "a plan directory cannot be read",
        """
A plan directory holds plan.json and one rank-NNNN.json per rank; a file is
missing or cannot be read. `zbc plan JOB.toml -o DIR` writes one.
""",
    ),
    "E402": entry(
        "a plan was edited after planning",
        """
plan.json keeps the sha256 of every file of the plan, and one of the files
differs. An edited plan does not run, since it was not proven.
`zbc check DIR` also says what is wrong with its ops. Make the plan again; an
order of your own is best written as a plugin (schedule.plugin).
""",
    ),
    "E403": entry(
        "a plan of another version",
        """
The plan was written by a zbc whose plan format this one does not read, or
whose plan.json has other fields; nobody edited it. Plan the job again.
""",
    ),
    "E404": entry(
        "a plan file is damaged",
        """
It is cut off, not JSON, not a plan, or contains lines that are not ops of
this plan. Make the plan again with `zbc plan JOB.toml`.
""",
    ),
    "E405": entry(
        "something else is in the place of the plan",
        """
A plan directory is replaced as a whole, so zbc only replaces directories that
are empty or hold nothing but a plan. Choose another place with -o.
""",
    ),
    "E406": entry(
        "the plan needs ops that this zbc does not have",
        """
The plan was written by a newer zbc. Use that one, or plan again.
""",
    ),
    "E407": entry(
        "a plan directory cannot be written",
        """
The system refused: no permission, no space, or a file where a folder has to
be. Nothing was changed.
""",
    ),
    "E410": entry(
        "a CSV file cannot be read",
        """
An order in torch's form is a text file of comma-separated values, one row per
rank and one action per cell, as `0F0,0F1,0B0,0B1`. The file does not exist,
is not text, or has no such rows.
""",
    ),
    "E411": entry(
        "a cell of a CSV file is not an action",
        """
An action is a stage, a letter and a microbatch: 2F0 is the forward of stage 2
for microbatch 0; I is the input gradient, W the weight gradient and B both in
one. torch reads a cell as far as it makes sense and drops the rest, so that
2F0garbage is 2F0 to it; zbc does not guess. Cells like 0SEND_F1 or 1UNSHARD
belong to torch's lowered form: dump the schedule with format="compute_only".
""",
    ),
    "E412": entry(
        "the rows of a CSV file make no pipeline",
        """
Each row is a rank with work, each stage stands in one row only, and stages and
microbatches are numbered 0, 1, 2, ... without gaps.
""",
    ),
    "E413": entry(
        "another tool cannot express the plan",
        """
`zbc export` writes a file only if it says the same as the plan. What the other
tool has no words for (a second pipe, slices, an order that is not one of its
own) is named; `zbc export PLAN --to json` keeps all of it.
""",
    ),
    "E414": entry(
        "an order cannot be repaired by moving its ops",
        """
`zbc check FILE.csv --suggest` changes the order of actions and drops repeated
ones. It does not invent actions that are missing: add them first.
""",
    ),
    "E415": entry(
        "a plan without its job cannot be written",
        """
A plan directory holds the model, the training section and the costs of a job
beside the order of ops. A plan that was read, from a directory or from a CSV
file, is not written again. Plan a job; `schedule.file` takes an order in
torch's CSV form.
""",
    ),
    "E430": entry(
        "there is no trace of a run",
        """
`zbc run PLAN --trace 10-19` records when each rank did what, in the folder
`trace` of the run directory: a file per rank, and a copy of the plan. Ranks of
several machines write theirs where they run; copy them to one place. A run that
was killed in its first recorded step has left nothing to read.
""",
    ),
    "E431": entry(
        "a trace is damaged",
        """
A file of the trace has a line that is not as zbc writes it; the message names
file and line. Each line is one JSON object. An incomplete last line, which a
killed run leaves, is no error: steps that all ranks completed are read.
""",
    ),
    "E432": entry(
        "a step was not recorded",
        """
`zbc visualize RUN --from 12 --steps 3` can only draw steps that the run
recorded (`zbc run PLAN --trace STEPS`). A run that was killed has them up to
the last one that all its ranks completed.
""",
    ),
}
