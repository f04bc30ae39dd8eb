"""Ten thousand damaged inputs: job files, plan directories, token files, config.json, weight files, checkpoints.

    python bench/fuzz.py [COUNT]

Each ends in success or in a ZbcError; anything else is printed with the seed that makes it again, and ends this with 1.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.fuzzing import Inputs, survives


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    record, failed = Record("fuzz"), 0
    with tempfile.TemporaryDirectory() as folder:
        inputs = Inputs(Path(folder))
        share = count // len(inputs.kinds)
        for kind in inputs.kinds:
            fine, began = 0, time.perf_counter()
            for seed in range(share):
                try:
                    fine += survives(inputs, kind, seed)
                except Exception:
                    failed += 1
                    record(f"{kind} {seed}\n{traceback.format_exc()}")
            took = time.perf_counter() - began
            record(f"{kind:8} {share:6d} inputs  {fine:6d} read  {share - fine:6d} refused  {took:7.1f} s")
    record(f"neither read nor refused with a ZbcError: {failed}")
    if len(sys.argv) == 1:
        record.write()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
