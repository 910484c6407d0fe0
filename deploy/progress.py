"""Turns cargo's progress bar into a line every 15 seconds, for logs. Reads cargo's standard error, passes on what isn't progress."""

import re
import sys
import time

EVERY_S = 15
BAR = re.compile(r"Building \[[^\]]*\]\s*(\d+)/(\d+)(?:: (.*))?")
QUIET = re.compile(r"^\s*(Compiling|Downloaded|Adding|Fresh|Dirty) ")


def main():
    last = time.monotonic()
    pending = ""
    while chunk := sys.stdin.buffer.read1(65536):
        pending += chunk.decode(errors="replace")
        *lines, pending = re.split(r"[\r\n]", pending)
        for line in lines:
            line = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).rstrip()
            bar = BAR.search(line)
            if bar:
                if time.monotonic() - last >= EVERY_S:
                    last = time.monotonic()
                    done, units, names = bar.groups()
                    print(f"    {done} of {units} built; now {names or '…'}", flush=True)
            elif line and not QUIET.match(line):
                print(line, flush=True)
    if pending.strip() and not BAR.search(pending):
        print(pending.rstrip(), flush=True)


main()
