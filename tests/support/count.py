"""Reads nextest's JUnit report and prints the closing line. A test that printed `skipped: why` could not run here."""

import re
import sys
import xml.etree.ElementTree as tree

passed = failed = 0
skipped, slow, failures, flaky = [], [], [], []
for suite in tree.parse(sys.argv[1]).getroot().iter("testsuite"):
    for case in suite.iter("testcase"):
        name = f"{suite.get('name')} {case.get('name')}"
        printed = "\n".join(e.text or "" for tag in ("system-out", "system-err") for e in case.iter(tag))
        why = re.search(r"^skipped: (.*)", printed, re.M)
        slow.append((float(case.get("time", "0")), name))
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
            failures.append(name)
        elif case.find("skipped") is not None or why:
            skipped.append(f"{name}: {why[1] if why else 'ignored'}")
        else:
            passed += 1
            if case.find("flakyFailure") is not None or case.find("flakyError") is not None:
                flaky.append(name)

print("\nslowest:")
for seconds, name in sorted(slow, reverse=True)[:8]:
    print(f"  {seconds:6.1f} s  {name}")
for title, rows in (("skipped", skipped), ("passed at the second try", flaky), ("failed", failures)):
    if rows:
        print(f"\n{title}:")
        print("\n".join(f"  {row}" for row in rows))
print(f"\n{passed} passed, {failed} failed, {len(skipped)} skipped")
sys.exit(1 if failed or not passed else 0)
