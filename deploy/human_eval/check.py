"""Runs in each task: the solution with its tests comes on standard input. Exit code 0: all tests passed; 1: they did not."""

import json
import os
import pathlib
import sys
import time
import traceback

out = pathlib.Path(os.environ["VOLLEY_OUTPUT_DIR"])
program = sys.stdin.read()
(out / "solution.py").write_text(program)
started = time.monotonic()
try:
    exec(compile(program, "solution.py", "exec"), {"__name__": "solution"})
    error = None
except Exception:
    traceback.print_exc()
    error = traceback.format_exc(limit=-1).strip().splitlines()[-1]
verdict = {
    "problem": os.environ["PROBLEM"],
    "kind": os.environ["KIND"],
    "passed": error is None,
    "error": error,
    "ms": round((time.monotonic() - started) * 1000),
}
(out / "result.json").write_text(json.dumps(verdict))
sys.exit(0 if error is None else 1)
