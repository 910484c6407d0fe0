"""Prints the demo's table and checks it. Usage: table.py ITEMS RESULTS PROBLEMS. Exits with 0 only if every task ended as it must."""

import json
import sys

COLUMNS = ["passed", "wrong answer", "timed out", "infra failure", "other"]
WANTED = {"canonical": "passed", "wrong": "wrong answer", "endless": "timed out"}


def outcome(row):
    if row["state"] == "succeeded":
        return "passed"
    if not row["valid"]:
        return "infra failure"
    if row["class"] == "exit_code" and row["code"] == 1:
        return "wrong answer"
    if row["class"] == "run_timeout":
        return "timed out"
    return "other"


def main():
    problems = int(sys.argv[3])
    items = [json.loads(line) for line in open(sys.argv[1])]
    rows = [json.loads(line) for line in open(sys.argv[2])]
    ended = {row["index"]: row for row in rows}
    table = {kind: dict.fromkeys(COLUMNS, 0) for kind in WANTED}
    wrong = []
    for index, item in enumerate(items):
        row = ended.get(index)
        if row is None:
            wrong.append(f"task {index} ({item['problem']}, {item['kind']}) has no result")
            continue
        found = outcome(row)
        table[item["kind"]][found] += 1
        if found != WANTED[item["kind"]]:
            wrong.append(f"task {index} ({item['problem']}, {item['kind']}): {found}: {row['class']} {row['code']} {row['message']}")
    print(f"{'SOLUTION':<12}" + "".join(f"{column:>15}" for column in COLUMNS))
    for kind, counts in table.items():
        print(f"{kind:<12}" + "".join(f"{counts[column]:>15}" for column in COLUMNS))
    if len(items) != 3 * problems or len(rows) != len(items):
        wrong.append(f"{len(items)} items and {len(rows)} results, not {3 * problems} of each")
    for line in wrong[:20]:
        print(f"wrong: {line}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


main()
